"""The contest's files: a row per method and seed, the curves of seed 0, and the printed table."""

import statistics
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from recipes.experiments import ResultTable
from recipes.two_direction.contest import Setting, run_all
from recipes.two_direction.tuning import MethodRun, Point

# Total coordinates of a worker until f - f* <= 1e-6: digits, 10 workers, K = 65. An earlier program
# of ours measured them. Nothing else of it is left.
REFERENCE = {
    (1e-4, "2Direction"): 333_125,
    (1e-4, "AGD"): 523_900,
    (1e-4, "EF21-P + DIANA"): 832_000,
    (1e-2, "2Direction"): 104_650,
    (1e-2, "AGD"): 79_300,
    (1e-2, "EF21-P + DIANA"): 34_450,
}
_REFERENCE_SETTING = ("digits", 10, 65, 1e-6)
CURVE_COLUMNS = ("method", "iteration", "up", "down", "total", "bytes", "value", "gap")
# More points would not change the picture, and a run has up to 10,000 of them.
_CURVE_POINTS = 200


@dataclass(frozen=True)
class ContestRow:
    """The result of one run, and a row of the table.

    Attributes:
        method: its name.
        power: i of the step size 2^i.
        seed: of the shards and the compressors.
        reached: whether f - f* reached the gap.
        iterations: until then, or until the budget was spent.
        value: the last f.
        up: coordinates that one worker sent.
        down: coordinates that it received.
        total: the sum of both.
        bytes_up: bytes of the messages that it sent.
        bytes_down: bytes of the messages that it received.
    """

    method: str
    power: int
    seed: int
    reached: bool
    iterations: int
    value: float
    up: int
    down: int
    total: int
    bytes_up: int
    bytes_down: int

    @classmethod
    def of(cls, method: str, power: int, seed: int, run: MethodRun) -> "ContestRow":
        """Summarise a run."""
        last, traffic = run.curve[-1], run.curve[-1].traffic
        return cls(
            method,
            power,
            seed,
            run.reached,
            last.iterations,
            last.value,
            traffic.up_coordinates,
            traffic.down_coordinates,
            traffic.coordinates,
            traffic.up_bytes,
            traffic.down_bytes,
        )

    @classmethod
    def read(cls, row: dict[str, str]) -> "ContestRow":
        """Read a row of the table."""
        counts = [int(row[name]) for name in _COLUMNS[6:]]
        named = (row["method"], int(row["power"]), int(row["seed"]), row["reached"] == "True")
        return cls(*named, int(row["iterations"]), float(row["value"]), *counts)


_COLUMNS = tuple(each.name for each in fields(ContestRow))


@dataclass(frozen=True)
class ContestTables:
    """The two tables of one setting.

    Attributes:
        results: a row per method and seed.
        curves: about 200 points of each method's run with seed 0.
    """

    results: ResultTable
    curves: ResultTable

    @classmethod
    def open(cls, setting: Setting, seeds: int, folder: Path, *, resume: bool) -> "ContestTables":
        """Open both tables, with the finished methods if the run is resumed.

        Raises:
            RecipeError: if ``resume`` is set and a table was made with other settings.
        """
        name = f"{setting.samples.name}_n{setting.n}_mu{setting.mu:g}"
        task = setting.task(seeds)
        results = ResultTable(folder / f"{name}.csv", _COLUMNS, task, resume=resume)
        curves = ResultTable(folder / f"{name}_curves.csv", CURVE_COLUMNS, task, resume=resume)
        # An interruption between the two files leaves a method in one of them only.
        finished = _methods(results) & _methods(curves)
        for table in (results, curves):
            table.rows = [row for row in table.rows if row["method"] in finished]
        return cls(results, curves)

    def of_method(self, method: str) -> list[ContestRow]:
        """Return the method's rows, which are empty if it has not been run."""
        return [row for row in self.all_rows() if row.method == method]

    def all_rows(self) -> list[ContestRow]:
        """Return the rows of all finished methods."""
        return [ContestRow.read(row) for row in self.results.rows]

    def add(self, method: str, power: int, runs: list[MethodRun], least: float) -> None:
        """Append a method's runs and save both tables."""
        points = _thinned(runs[0].curve)
        self.curves.add(*([method, *_curve_cells(point, least)] for point in points))
        rows = [ContestRow.of(method, power, seed, run) for seed, run in enumerate(runs)]
        self.results.add(*map(astuple, rows))


def _methods(table: ResultTable) -> set[str]:
    return {row["method"] for row in table.rows}


def _thinned(curve: list[Point]) -> list[Point]:
    """Return every k-th point and the last one."""
    stride = -(-len(curve) // _CURVE_POINTS)
    kept = curve[::stride]
    return kept if kept[-1] is curve[-1] else [*kept, curve[-1]]


def _curve_cells(point: Point, least: float) -> list[object]:
    traffic = point.traffic
    sent = [traffic.up_coordinates, traffic.down_coordinates, traffic.coordinates, traffic.nbytes]
    return [point.iterations, *sent, f"{point.value:.12g}", f"{point.value - least:.6g}"]


def run_contest(
    setting: Setting, methods: list[str], seeds: int, tables: ContestTables
) -> list[ContestRow]:
    """Run the methods that the tables lack; print and save each one as it ends."""
    print(heading(setting))
    for method in methods:
        if not tables.of_method(method):
            tables.add(method, *run_all(setting, method, seeds), setting.least(0))
        print(line(setting, tables.of_method(method)), flush=True)
    return tables.all_rows()


def heading(setting: Setting) -> str:
    """Return the lines above the printed table."""
    counted = f"what a worker sends and receives until f - f* <= {setting.gap:g}"
    columns = f"{'':<22}{'step':>6}{'iterations':>12}{'coordinates: median, range':>38}{'MB':>9}"
    return f"\n{setting}: {counted}\n{columns}{'reference':>12}"


def line(setting: Setting, rows: list[ContestRow]) -> str:
    """Return a method's line of the printed table, over all seeds."""
    first = rows[0]
    name = f"{first.method:<22}{f'2^{first.power}':>6}"
    if not all(row.reached for row in rows):
        return f"{name}{'':>12}{f'not within {setting.budget:,}':>38}"
    totals = [row.total for row in rows]
    spread = f"{statistics.median(totals):,.0f} ({min(totals):,} to {max(totals):,})"
    iterations = statistics.median(row.iterations for row in rows)
    megabytes = statistics.median(row.bytes_up + row.bytes_down for row in rows) / 1e6
    # Another setting has no reference to compare with.
    comparable = (setting.samples.name, setting.n, setting.k, setting.gap) == _REFERENCE_SETTING
    known = REFERENCE.get((setting.mu, first.method)) if comparable else None
    reference = f"{known:,}" if known else ""
    return f"{name}{iterations:>12,.0f}{spread:>38}{megabytes:>9.2f}{reference:>12}"


def median_totals(rows: list[ContestRow]) -> dict[str, float]:
    """Return the median coordinates of each method that reached the gap, the lowest first."""
    by_method: dict[str, list[ContestRow]] = {}
    for row in rows:
        by_method.setdefault(row.method, []).append(row)
    medians = {
        method: statistics.median(row.total for row in own)
        for method, own in by_method.items()
        if all(row.reached for row in own)
    }
    return dict(sorted(medians.items(), key=lambda item: item[1]))
