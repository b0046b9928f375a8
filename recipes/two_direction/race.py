"""A race: methods on one problem, each with its best step size 2^i, and a row for each run.

A reported seed chooses no setting. Step sizes are tuned on the problem and the messages of a seed
that is not reported. A second such seed checks the choice: where f oscillates, the first can reach
the gap by chance with a step that is too large. If the second does not reach the gap, smaller steps
are tried.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace

from recipes.errors import RecipeError
from recipes.experiments import ResultTable, tuning_seeds
from recipes.two_direction.methods import ACCELERATED, METHODS, Messages, Problem
from recipes.two_direction.tuning import MethodRun, Tuned, tune
from torchcomp.two_direction.parameter_server import ParameterServer, Simulated

Case = Callable[[int], tuple[Problem, float]]
"""A function from a seed to the problem and the infimum of its value."""

CURVE_COLUMNS = ("mu", "method", "iterations", "total", "gap")
# More points would not change the picture.
_CURVE_POINTS = 100
# If the second tuning seed fails, try this many smaller step sizes.
_SMALLER = 3
# It fails if it needs this many times the coordinates of the first.
_SLOWER = 4


@dataclass(frozen=True)
class Setting:
    """The problem, the messages and the limits that all methods of a race share.

    Attributes:
        name: of the data.
        case: the problem of a seed.
        n: number of workers.
        mu: strong convexity; 0 is allowed.
        sent: the compressed messages.
        gap: a run ends when f - f* is at most this.
        budget: coordinates, up and down, that a run can send.
        powers: the i of the step sizes 2^i to try.
    """

    name: str
    case: Case
    n: int
    mu: float
    sent: Messages
    gap: float
    budget: int
    powers: range

    def __str__(self) -> str:
        sizes = f"{self.n} workers, K = {self.sent.k_up} up and {self.sent.k_down} down"
        chance = f", p = {self.sent.chance.p:.4g}" if self.sent.chance else ""
        return f"{self.name}, mu = {self.mu:g}, {sizes}{chance}"

    @property
    def shared(self) -> tuple[float, ...]:
        """What distinguishes the rows of this setting from others of the same table."""
        p = self.sent.chance.p if self.sent.chance else 0.0
        return (self.n, self.mu, self.sent.k_up, self.sent.k_down, p, self.gap)


Race = tuple[Setting, Sequence[str]]
"""A setting, and the names of the methods to run in it."""


@dataclass(frozen=True)
class Row:
    """One run, and a row of a table.

    Attributes:
        n: number of workers.
        mu: strong convexity.
        k_up: values of a worker's compressed message.
        k_down: values of the server's compressed message.
        p: probability of 2Direction's coin; 0 for its default, 1/(omega + 1).
        gap: of f - f*, at which the run ended.
        method: its name.
        power: i of the step size 2^i.
        seed: of the shards and the messages. If no step size reaches the gap on the tuning seed,
            its best run there is the only row.
        reached: whether f - f* reached the gap.
        iterations: until then, or until the budget was spent.
        value: the last f.
        up: coordinates that one worker sent.
        down: coordinates that it received.
        bytes_up: bytes of the messages that it sent.
        bytes_down: bytes of the messages that it received.
    """

    n: int
    mu: float
    k_up: int
    k_down: int
    p: float
    gap: float
    method: str
    power: int
    seed: int
    reached: bool
    iterations: int
    value: float
    up: int
    down: int
    bytes_up: int
    bytes_down: int

    @classmethod
    def of(cls, setting: Setting, method: str, power: int, seed: int, run: MethodRun) -> "Row":
        """Summarise a run."""
        last, sent = run.curve[-1], run.curve[-1].traffic
        counts = (sent.up_coordinates, sent.down_coordinates, sent.up_bytes, sent.down_bytes)
        outcome = (method, power, seed, run.reached, last.iterations, last.value, *counts)
        return cls(*setting.shared, *outcome)

    @classmethod
    def read(cls, row: dict[str, str]) -> "Row":
        """Read a row of the table."""
        return cls(*(_READERS[each.type](row[each.name]) for each in fields(cls)))

    @property
    def total(self) -> int:
        """Coordinates in both directions."""
        return self.up + self.down

    @property
    def nbytes(self) -> int:
        """Bytes in both directions."""
        return self.bytes_up + self.bytes_down

    @property
    def shared(self) -> tuple[float, ...]:
        """The :attr:`Setting.shared` of the row's setting."""
        return (self.n, self.mu, self.k_up, self.k_down, self.p, self.gap)


_READERS: dict[object, Callable[[str], object]] = {
    int: int,
    float: float,
    str: str,
    bool: "True".__eq__,
}
COLUMNS = tuple(each.name for each in fields(Row))


def rows_of(table: ResultTable) -> list[Row]:
    """Return the rows of a table.

    Raises:
        RecipeError: if a cell is missing or is not what its column holds.
    """
    try:
        return [Row.read(row) for row in table.rows]
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"--resume cannot use {table.path}, which has a damaged row ({error}): delete the row, "
            "or leave out --resume"
        ) from None


def steps(setting: Setting, method: str) -> list[int]:
    """Return the i of the step sizes 2^i that the method allows."""
    return [i for i in setting.powers if method not in ACCELERATED or 2.0**i * setting.mu <= 1]


def check(setting: Setting, methods: Sequence[str], seeds: Sequence[int]) -> None:
    """Find f* and construct every method, before anything is measured.

    Raises:
        RecipeError: if f* cannot be found, or a method allows none of the step sizes.
        SpecError: if a method refuses its compressors.
    """
    f, _ = setting.case(tuning_seeds(seeds, 1)[0])
    low, high = setting.powers[0], setting.powers[-1]
    for method in methods:
        if not (allowed := steps(setting, method)):
            raise RecipeError(
                f"--powers {low} {high}: {method} allows no step size above 1/mu = "
                f"{1 / setting.mu:g}; choose a smaller LOW"
            )
        METHODS[method](f, Simulated(setting.n), setting.sent, 2.0 ** allowed[0])


def run(
    setting: Setting, method: str, power: int, seed: int, server: ParameterServer | None = None
) -> MethodRun:
    """Run a method with step size 2^power until it reaches the gap or spends the budget."""
    f, least = setting.case(seed)
    built = METHODS[method](f, server or Simulated(setting.n, seed), setting.sent, 2.0**power)
    out = MethodRun(built, f.value, least + setting.gap)
    out.advance(setting.budget)
    return out


def tuned(setting: Setting, method: str, seeds: Sequence[int]) -> Tuned:
    """Return the method's step size 2^i, chosen with the tuning seeds of the reported ``seeds``."""
    first, second = tuning_seeds(seeds, 2)
    f, least = setting.case(first)
    best = tune(
        lambda step: METHODS[method](f, Simulated(setting.n, first), setting.sent, step),
        f.value,
        target=least + setting.gap,
        budget=setting.budget,
        powers=steps(setting, method),
    )
    if not best.run.reached:
        return best
    limited = replace(setting, budget=min(setting.budget, _SLOWER * best.run.cost))
    for power in range(best.power, best.power - 1 - _SMALLER, -1):
        if run(limited, method, power, second).reached:
            return replace(best, power=power)
    return best


def measure(
    setting: Setting, method: str, seeds: Sequence[int], known: Sequence[Row]
) -> Iterator[tuple[Row, MethodRun]]:
    """Run the seeds that the ``known`` rows of the method lack; yield each row and its run."""
    missing = [seed for seed in seeds if seed not in {row.seed for row in known}]
    # A single row of the tuning seed says that no step size reaches the gap.
    failed = [row.seed for row in known] == [tuning_seeds(seeds, 1)[0]]
    if not missing or failed:
        return
    if known:
        power = known[0].power
    else:
        best = tuned(setting, method, seeds)
        power = best.power
        if not best.run.reached:
            seed = tuning_seeds(seeds, 1)[0]
            yield Row.of(setting, method, power, seed, best.run), best.run
            return
    for seed in missing:
        done = run(setting, method, power, seed)
        yield Row.of(setting, method, power, seed, done), done


def known_rows(table: ResultTable, setting: Setting, method: str) -> list[Row]:
    """Return the rows that the table has of a method in a setting."""
    named = (setting.shared, method)
    return [row for row in rows_of(table) if (row.shared, row.method) == named]


def race(
    setting: Setting,
    methods: Sequence[str],
    seeds: Sequence[int],
    table: ResultTable,
    curves: ResultTable | None = None,
) -> None:
    """Run what the table lacks; save each run and print each method as it ends.

    Args:
        setting: the problem and its limits.
        methods: names of the methods.
        seeds: the reported seeds.
        table: receives a row for each run.
        curves: receives the curve of each method's first new run, if the table has none yet.
    """
    print(f"\n{setting}: f - f* <= {setting.gap:g}")
    for method in methods:
        known = known_rows(table, setting, method)
        for row, done in measure(setting, method, seeds, known):
            if curves and not known:
                points = curve_rows(setting, method, done, setting.case(row.seed)[1])
                # An interrupted run can have left the curve without the row.
                named = [str(cell) for cell in points[0][:2]]
                curves.rows = [
                    each for each in curves.rows if [each["mu"], each["method"]] != named
                ]
                curves.add(*points)
            table.add(astuple(row))
            known = [*known, row]
        print(line(known), flush=True)


def curve_rows(
    setting: Setting, method: str, done: MethodRun, least: float
) -> list[Sequence[object]]:
    """Return about :data:`_CURVE_POINTS` points of a run, in the columns :data:`CURVE_COLUMNS`."""
    stride = -(-len(done.curve) // _CURVE_POINTS)
    points = [*done.curve[:-1:stride], done.curve[-1]]
    named = (setting.mu, method)
    return [
        (*named, each.iterations, each.traffic.coordinates, f"{each.value - least:.6g}")
        for each in points
    ]


def line(rows: Sequence[Row]) -> str:
    """Return a method's line of the printed table, over all seeds."""
    reached = [row.total for row in rows if row.reached]
    name = f"{rows[0].method:<22}{f'2^{rows[0].power}':>6}{len(reached):>4} of {len(rows)}"
    if not reached:
        return f"{name}   not within {rows[0].total:,} coordinates"
    spread = f"{min(reached):,} to {max(reached):,} coordinates"
    return f"{name}   {sum(reached) / len(reached):,.0f} coordinates ({spread})"
