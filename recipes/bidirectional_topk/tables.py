"""The tables of the page, from the committed results."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from recipes.bidirectional_topk import counterexample
from recipes.bidirectional_topk.runs import BOTH_WAYS, FORMS, LR_RUN, ONE_WAY, WINDOW, best_lr
from recipes.bidirectional_topk.workers import METHODS
from recipes.rows import Row, Spread, by_seed, grouped, over_seeds, paired, read_rows, spread, where
from recipes.tables import TableMaker, markdown_table, table
from torchcomp import explain

PUBLISHED = {20: 19.4, 50: 46.5, 100: 86.0}
"""The thesis's unions by N, for K = 0.001 d."""


# --- Unions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unions:
    """Runs that differ only in their seed."""

    rows: list[Row]

    def __getattr__(self, column: str) -> Any:
        return self.rows[0][column]

    def over(self, first: int, last: int) -> dict[int, float]:
        """Return the mean union of the steps after ``first`` and up to ``last``, by seed."""
        chosen = slice(first // WINDOW, last // WINDOW)
        windows = {seed: found[chosen] for seed, found in self.windows.items()}
        return {seed: statistics.fmean(found) for seed, found in windows.items()}

    @property
    def windows(self) -> dict[int, list[float]]:
        """Mean union of every window, in units of K, by seed."""
        return by_seed(self.rows, lambda row: [*map(float, str(row["unions"]).split())])

    @property
    def late(self) -> dict[int, float]:
        """Mean union over the last 400 of 1000 steps, by seed."""
        return self.over(self.steps * 3 // 5, self.steps)

    @property
    def halves(self) -> tuple[dict[int, float], dict[int, float]]:
        """Both halves of :attr:`late`. They are equal if the union has stopped changing."""
        first, middle = self.steps * 3 // 5, self.steps * 4 // 5
        return self.over(first, middle), self.over(middle, self.steps)

    @property
    def change(self) -> str:
        """By how much the union changes between these halves."""
        before, after = self.halves
        return paired(after, before).with_error()

    @property
    def random(self) -> float:
        """Expected union of random supports among all parameters, in units of K."""
        return random_union(self.d, self.k, self.workers)

    @property
    def saving(self) -> dict[int, float]:
        """Bytes of a server's message with the union, over those with K entries, by seed."""
        return {seed: self._saving(union) for seed, union in self.late.items()}

    @property
    def random_saving(self) -> float:
        """The same for the expected union of random supports."""
        return self._saving(self.random)

    def _saving(self, union: float) -> float:
        return self._bytes(round(union * self.k)) / self._bytes(self.k)

    def _bytes(self, entries: int) -> int:
        # The server sends the entries, or all d values if those are smaller.
        plan = explain(f"topk(k={entries})", numel=self.d, world_size=1)
        return min(plan.message_bytes, 4 * int(self.d))


def random_union(d: int, k: int, workers: int) -> float:
    """Return the expected union of random supports of ``k`` of ``d`` entries, in units of k."""
    return d * (1 - (1 - k / d) ** workers) / k


Quantity = Callable[[Unions], Mapping[int, float]]
"""From runs with the same settings to a value by seed."""
_SETTINGS = ("model", "method", "workers")


def unions_of(results: Path) -> list[Unions]:
    """Return the runs of the table, grouped by their settings, in order of N."""
    groups = grouped(read_rows(results / "union.csv"), *_SETTINGS).values()
    return sorted(map(Unions, groups), key=lambda each: int(each.workers))


def usual(groups: Sequence[Unions], **changed: Any) -> list[Unions]:
    """Return the unidirectional runs of the MLP, except for what is ``changed``, in order of N."""
    like = {"model": "mlp", "method": ONE_WAY, **changed}
    return [e for e in groups if all(getattr(e, name) == value for name, value in like.items())]


@dataclass(frozen=True)
class Growth:
    """How a quantity grows with N, over the seeds: a straight line, and b of a power law a N^b."""

    slope: Spread
    intercept: Spread
    r2: Spread
    exponent: Spread


def growth(groups: Sequence[Unions], quantity: Quantity) -> Growth:
    """Fit a quantity against N, for each seed separately."""
    n = [group.workers for group in groups]
    values = [quantity(group) for group in groups]
    fits = [_fit(n, [of_seed[seed] for of_seed in values]) for seed in values[0]]
    return Growth(*map(spread, zip(*fits, strict=True)))


def _fit(n: Sequence[int], values: Sequence[float]) -> tuple[float, float, float, float]:
    slope, intercept = statistics.linear_regression(n, values)
    r2 = statistics.correlation(n, values) ** 2
    exponent, _ = statistics.linear_regression([*map(math.log, n)], [*map(math.log, values)])
    return slope, intercept, r2, exponent


def interval(values: Spread) -> str:
    """Return a mean and the 95 % confidence interval of it, by Student's t."""
    if values.count == 1:
        return f"{values.mean:.3f}"
    half = float(stats.t.ppf(0.975, values.count - 1)) * values.error
    return f"{values.mean:.3f} ({values.mean - half:.3f} to {values.mean + half:.3f})"


def _deviation(found: Mapping[int, float], digits: int = 2) -> str:
    return spread(found.values()).with_deviation(digits)


def unions(results: Path) -> str:
    groups = unions_of(results)
    both_ways = {each.workers: each for each in usual(groups, method=BOTH_WAYS)}
    last = groups[0].steps
    late, middle = last * 3 // 5, last * 4 // 5
    columns = {
        "N": lambda each: each.workers,
        "thesis": lambda each: PUBLISHED.get(each.workers, ""),
        "random supports": lambda each: f"{each.random:.2f}",
        "steps 1-25": lambda each: f"{spread(each.over(0, 25).values()).mean:.2f}",
        f"{late + 1}-{middle}": lambda each: _deviation(each.halves[0]),
        f"{middle + 1}-{last}": lambda each: _deviation(each.halves[1]),
        "change": lambda each: each.change,
        f"bidirectional, {late + 1}-{last}": lambda each: _deviation(both_ways[each.workers].late),
    }
    return table(columns, usual(groups))


def savings(results: Path) -> str:
    columns = {
        "N": lambda each: each.workers,
        "entries": lambda each: f"{_deviation(each.late, 1)}x",
        "bytes": lambda each: f"{_deviation(each.saving, 1)}x",
        "bytes, random supports": lambda each: f"{each.random_saving:.1f}x",
    }
    return table(columns, usual(unions_of(results)))


def _nbytes(each: Unions) -> Mapping[int, float]:
    return each.saving


def growths(results: Path) -> str:
    groups = unions_of(results)
    digits, cnn = usual(groups), usual(groups, model="cnn")
    alike = [each for each in digits if each.workers in {e.workers for e in cnn}]
    fitted: list[tuple[str, list[Unions], Quantity]] = [
        ("MLP, entries", digits, lambda each: each.late),
        ("MLP, bytes", digits, _nbytes),
        ("MLP, bytes, the N below", alike, _nbytes),
        ("CNN, bytes", cnn, _nbytes),
        ("random supports (MLP), entries", digits, lambda each: {0: each.random}),
        ("random supports (MLP), bytes", digits, lambda each: {0: each.random_saving}),
    ]
    # A line through two points shows nothing.
    fits = [(name, found, growth(found, what)) for name, found, what in fitted if len(found) > 2]
    columns = {
        "saving in": lambda each: each[0],
        "N": lambda each: ", ".join(str(group.workers) for group in each[1]),
        "slope on N": lambda each: each[2].slope.with_deviation(3),
        "intercept": lambda each: each[2].intercept.with_deviation(2),
        "R²": lambda each: each[2].r2.with_deviation(4),
        "exponent of N, 95 % interval": lambda each: interval(each[2].exponent),
    }
    return table(columns, fits)


# --- Traffic without a server ---------------------------------------------------------------------


def traffic(results: Path) -> str:
    """Return the counted and planned bytes that one of N ranks receives per step."""
    rows = read_rows(results / "traffic.csv")
    ratio, d = rows[0]["ratio"], rows[0]["d"]
    gather = METHODS[ONE_WAY].spec(ratio)
    planned = {
        'all, `selection="shard"`': METHODS[BOTH_WAYS].spec(ratio, selection="shard"),
        "`ef(topk)`, allgather": gather,
        "`ef(topk)`, sharded": gather.replace("allgather", "sharded"),
    }
    ways = ("up", "down", "selection")
    counted: dict[str, Callable[[Row], float]] = {way: lambda r, w=way: r[w] for way in ways}
    counted["all"] = lambda row: sum(row[way] for way in ways)
    counted["busiest rank, up"] = lambda row: row["busiest"]
    columns: dict[str, Callable[[list[Row]], object]] = {"N": lambda same: same[0]["workers"]}
    for head, value in counted.items():
        columns[head] = lambda same, value=value: f"{over_seeds(same, value).mean:,.0f}"
    for head, spec in planned.items():
        columns[head] = lambda same, spec=spec: (
            f"{explain(spec, numel=d, world_size=same[0]['workers']).bytes_received:,.0f}"
        )
    groups = grouped(sorted(rows, key=lambda row: int(row["workers"])), "workers")
    return table(columns, groups.values())


# --- Accuracy -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model with N workers: each method's learning rate, and its test accuracies by seed."""

    name: str
    lrs: dict[str, float]
    accuracies: dict[str, dict[int, float]]

    def ahead(self, ours: str, theirs: str) -> Spread:
        return paired(self.accuracies[ours], self.accuracies[theirs])


def cases(results: Path) -> list[Case]:
    """Return the accuracies, the MLP first and N ascending."""
    rows = read_rows(results / "accuracy.csv")
    groups = grouped(rows, "model", "workers")
    found = []
    for model, n in sorted(groups, key=lambda case: (case[0] != "mlp", case[1])):
        own = groups[model, n]
        lrs = {method: best_lr(own, {"method": method}) for method in METHODS}
        # Other tuning seeds can have chosen another learning rate in an earlier session.
        tested = {
            method: by_seed(where(own, images="test", method=method, lr=lr), "accuracy")
            for method, lr in lrs.items()
        }
        found.append(Case(f"{model.upper()}, N = {n}", lrs, tested))
    return found


def accuracy(results: Path) -> str:
    columns: dict[str, Callable[[Case], str]] = {"": lambda case: case.name}
    for method in METHODS:
        columns[method] = lambda case, method=method: (
            f"{_deviation(case.accuracies[method])} ({case.lrs[method]:g})"
        )
    return table(columns, cases(results))


def differences(results: Path) -> str:
    pairs = [(name, "dense") for name in METHODS if name != "dense"]
    pairs += [(name, ONE_WAY) for name in (BOTH_WAYS, "downlink only")]
    columns: dict[str, Callable[[Case], str]] = {"": lambda case: case.name}
    for ours, theirs in pairs:
        columns[f"{ours} - {theirs}"] = lambda case, pair=(ours, theirs): case.ahead(
            *pair
        ).with_error()
    return table(columns, cases(results))


def lr_inside(results: Path) -> str:
    rows = read_rows(results / "lr_inside.csv")

    def tested(case: tuple[str, str], form: str) -> list[Row]:
        named = dict(zip(LR_RUN, (*case, form), strict=False))
        return where(rows, images="test", lr=best_lr(rows, named), **named)

    def accuracies(case: tuple[str, str], form: str) -> dict[int, float]:
        return by_seed(tested(case, form), "accuracy")

    columns = {
        "learning rate": lambda case: case[0],
        "method": lambda case: case[1],
        "outside, %": lambda case: _deviation(accuracies(case, "outside")),
        "inside, %": lambda case: _deviation(accuracies(case, "inside")),
        "inside - outside": lambda case: paired(
            accuracies(case, "inside"), accuracies(case, "outside")
        ).with_error(),
        "peak lr": lambda case: " / ".join(f"{tested(case, form)[0]['lr']:g}" for form in FORMS),
    }
    return table(columns, grouped(rows, "schedule", "method"))


# --- The counterexample ---------------------------------------------------------------------------


def counterexample_values(results: Path) -> str:
    rows = where(read_rows(results / "counterexample.csv"), lr=counterexample.LR)
    header = ["", *(f"F({t})" for t in counterexample.MOMENTS)]
    header.append(f"mean F over [{counterexample.TAIL_FROM}, {counterexample.STEPS})")
    return markdown_table(header, [[row["method"], *counterexample.numbers(row)] for row in rows])


def counterexample_scan(results: Path) -> str:
    """Return how far above the minimum F stays, by learning rate; the lower one in bold."""
    gaps = counterexample.late_gaps(read_rows(results / "counterexample.csv"))
    columns: dict[str, Callable[[str], str]] = {"": lambda method: method}
    for lr, each in gaps.items():
        columns[f"{lr:g}"] = lambda method, each=each: (
            f"**{each[method]:.2f}**"
            if each[method] == min(each.values())
            else f"{each[method]:.2f}"
        )
    return table(columns, counterexample.SCANNED)


TABLES: dict[str, TableMaker] = {
    "counterexample_values": counterexample_values,
    "counterexample_scan": counterexample_scan,
    "unions": unions,
    "savings": savings,
    "growths": growths,
    "traffic": traffic,
    "accuracy": accuracy,
    "differences": differences,
    "lr_inside": lr_inside,
}
