"""What the tables and pictures show of the finished runs: means over seeds, and fits over N."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from scipy import stats

from recipes.bidirectional_topk.accuracy import best_lr
from recipes.bidirectional_topk.downlink import (
    Traffic,
    random_union,
    received_bytes,
    server_bytes,
)
from recipes.bidirectional_topk.methods import METHODS
from recipes.bidirectional_topk.problems import SHIFTED_DIGITS
from recipes.bidirectional_topk.runs import WINDOW, Run
from recipes.bidirectional_topk.union import BOTH_WAYS, LR, ONE_WAY, STEPS
from recipes.spread import Spread, paired, spread

PUBLISHED = {20: 19.4, 50: 46.5, 100: 86.0}
"""The thesis's unions by N, for K = 0.001 d."""
Row = dict[str, str]
"""A row of a result table, as texts by column."""
Quantity = Callable[["Unions"], Mapping[int, float]]
"""From runs with the same settings to a value by seed."""


@dataclass
class Unions:
    """Runs that differ only in their seed.

    Attributes:
        run: their settings, with seed 0.
        d, k: number of parameters, and of entries of a message.
        touched: number of parameters that ever had a gradient other than 0, by seed.
        windows: mean union of every window of :data:`WINDOW` steps, in units of K, by seed.
    """

    run: Run
    d: int
    k: int
    touched: dict[int, int] = field(default_factory=dict)
    windows: dict[int, list[float]] = field(default_factory=dict)

    def over(self, first: int, last: int) -> dict[int, float]:
        """Return the mean union of the steps after ``first`` and up to ``last``, by seed."""
        chosen = slice(first // WINDOW, last // WINDOW)
        return {seed: statistics.fmean(values[chosen]) for seed, values in self.windows.items()}

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
    def change(self) -> Spread:
        """By how much the union changes between these halves."""
        before, after = self.halves
        return paired(after, before)

    @property
    def steps(self) -> int:
        """Steps that are summarised. Of longer runs it is the first part, for comparison."""
        return min(STEPS, self.run.steps)

    @property
    def random(self) -> float:
        """Expected union of random supports among all parameters, in units of K."""
        return random_union(self.d, self.k, self.run.workers)

    @property
    def random_touched(self) -> float:
        """Expected union of random supports among the touched parameters, in units of K."""
        touched = round(statistics.fmean(self.touched.values()))
        return random_union(touched, self.k, self.run.workers)

    @property
    def saving(self) -> dict[int, float]:
        """Bytes of a server's message with the union, over those with K entries, by seed."""
        one = server_bytes(self.d, self.k)
        return {
            seed: server_bytes(self.d, round(union * self.k)) / one
            for seed, union in self.late.items()
        }

    @property
    def random_saving(self) -> float:
        """The same for the expected union of random supports."""
        return server_bytes(self.d, round(self.random * self.k)) / server_bytes(self.d, self.k)


def grouped(rows: Iterable[Row]) -> list[Unions]:
    """Return the runs of a table, grouped by their settings, in order of N."""
    groups: dict[Run, Unions] = {}
    for row in rows:
        run = Run.of(row)
        key = replace(run, seed=0)
        group = groups.setdefault(key, Unions(key, int(row["d"]), int(row["k"])))
        group.touched[run.seed] = int(row["touched"])
        group.windows[run.seed] = [*map(float, row["unions"].split())]
    return sorted(groups.values(), key=lambda group: group.run.workers)


def usual(groups: Sequence[Unions], **changed: Any) -> list[Unions]:
    """Return the unidirectional runs of the MLP, except for what is ``changed``, in order of N."""
    # The shifted digits are measured beside another data set, unless they were chosen alone.
    datasets = sorted({each.run.dataset for each in groups} - {SHIFTED_DIGITS})
    like = Run((*datasets, SHIFTED_DIGITS)[0], "mlp", ONE_WAY, 0, LR, groups[0].steps, seed=0)
    return [e for e in groups if e.run == replace(like, workers=e.run.workers, **changed)]


@dataclass(frozen=True)
class Growth:
    """How a quantity grows with N, over the seeds.

    Attributes:
        slope, intercept, r2: of a straight line.
        exponent: b of a power law a N^b, by least squares of the logarithms.
    """

    slope: Spread
    intercept: Spread
    r2: Spread
    exponent: Spread


def growth(groups: Sequence[Unions], quantity: Quantity) -> Growth:
    """Fit a quantity against N, for each seed separately."""
    n = [group.run.workers for group in groups]
    values = [quantity(group) for group in groups]
    fits = [_fit(n, [of_seed[seed] for of_seed in values]) for seed in values[0]]
    return Growth(*map(spread, zip(*fits, strict=True)))


def _fit(n: Sequence[int], values: Sequence[float]) -> tuple[float, float, float, float]:
    slope, intercept = statistics.linear_regression(n, values)
    r2 = statistics.correlation(n, values) ** 2
    exponent, _ = statistics.linear_regression([*map(math.log, n)], [*map(math.log, values)])
    return slope, intercept, r2, exponent


def confidence(values: Spread) -> float:
    """Return half the width of the 95 % confidence interval of the mean, by Student's t."""
    return float(stats.t.ppf(0.975, values.count - 1)) * values.error


@dataclass(frozen=True)
class TrafficMeans:
    """Bytes that one of N ranks receives per step, as a mean over the seeds.

    Attributes:
        up, down, selection, busiest: counted; see :class:`.downlink.Traffic`.
        by_shard: planned, in total, with ``selection="shard"``.
        gather, sharded: planned, with an uncompressed downlink, by the two routes of ``ef``.
    """

    workers: int
    up: float
    down: float
    selection: float
    busiest: float
    by_shard: int
    gather: int
    sharded: int

    @property
    def total(self) -> float:
        """All counted bytes."""
        return self.up + self.down + self.selection


def traffic_means(rows: Iterable[Row]) -> list[TrafficMeans]:
    """Return the counted and planned bytes by N, from the rows of compressed downlinks."""
    by_workers: dict[int, list[Row]] = {}
    for row in rows:
        if row["down"]:
            by_workers.setdefault(int(row["workers"]), []).append(row)
    return [_traffic_mean(n, same) for n, same in sorted(by_workers.items())]


def _traffic_mean(n: int, rows: list[Row]) -> TrafficMeans:
    ratio, d = float(rows[0]["ratio"]), int(rows[0]["d"])
    gather = METHODS[ONE_WAY].spec(ratio)
    by_shard = METHODS[BOTH_WAYS].spec(ratio, selection="shard")
    return TrafficMeans(
        workers=n,
        by_shard=received_bytes(by_shard, d, n),
        gather=received_bytes(gather, d, n),
        sharded=received_bytes(gather.replace("allgather", "sharded"), d, n),
        **{
            each.name: statistics.fmean(float(row[each.name]) for row in rows)
            for each in fields(Traffic)
        },
    )


@dataclass
class Scores:
    """One method on one problem with N workers.

    Attributes:
        lr: the learning rate of the reported runs.
        accuracies: on the test images, in per cent, by seed.
        tried: mean accuracy on the held-out images, in per cent, by learning rate.
    """

    lr: float
    accuracies: dict[int, float]
    tried: dict[float, float]


def scores(rows: Sequence[Row]) -> dict[tuple[str, int], dict[str, Scores]]:
    """Return the accuracies of a table by model and N, and then by method."""
    found: dict[tuple[str, int], dict[str, Scores]] = {}
    held_out: dict[tuple[str, int, str, float], list[float]] = {}
    for row in rows:
        run, accuracy = Run.of(row), float(row["accuracy"])
        methods = found.setdefault((run.model, run.workers), {})
        if run.method not in methods:
            methods[run.method] = Scores(best_lr(run, rows), {}, {})
        of_method = methods[run.method]
        if run.images == "validation":
            key = (run.model, run.workers, run.method, run.lr)
            held_out.setdefault(key, []).append(accuracy)
        # Other tuning seeds can have chosen another learning rate in an earlier session.
        elif run.lr == of_method.lr:
            of_method.accuracies[run.seed] = accuracy
    for (model, workers, method, lr), values in held_out.items():
        found[model, workers][method].tried[lr] = statistics.fmean(values)
    # The MLP first, and N ascending.
    return dict(sorted(found.items(), key=lambda item: (item[0][0] != "mlp", item[0][1])))
