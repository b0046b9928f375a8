"""The tables of the pages, from the committed results."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from recipes.jointspar.convergence import DENSE, QUANTITIES, chosen_lrs
from recipes.jointspar.methods import LayerSampling, parse_method
from recipes.rows import (
    Row,
    Spread,
    best,
    by_seed,
    distinct,
    grouped,
    over_seeds,
    paired,
    read_rows,
    spread,
    where,
)
from recipes.tables import TableMaker, markdown_table, table
from torchcomp.jointspar import Literal

FAILED = 10.0
"""A run fails if it diverges, or ends this many points below the mean of dense training."""
LEVELS = (0.1, 0.01)
"""Training losses, in nats, that the steps of two methods are compared at."""


# --- Convergence ----------------------------------------------------------------------------------


def name_of(text: str) -> str:
    method = parse_method(text)
    if not isinstance(method, LayerSampling):
        return method.name
    if method.rule is None:
        return "uniform, shared sets"
    rule = "paper's rule" if isinstance(method.rule, Literal) else "`Baseline`"
    sets = "shared sets" if method.shared else "per-rank sets"
    return f"{rule}, {sets}, {method.costs}"


_NAMED: dict[str, Callable[[str], str]] = {
    "method": name_of,
    "budget": lambda method: f"{parse_method(method).budget:.0%}",
}


def epochs_to(row: Row, level: float) -> float:
    """Return the epochs until the training loss is first at most ``level``; NaN if it never is."""
    losses = curve_of(row)
    if losses[0] <= level:
        return 1.0
    for epoch, (before, after) in enumerate(pairwise(losses), start=1):
        if after <= level < before:
            return epoch + math.log(before / level) / math.log(before / after)
    return math.nan


def curve_of(row: Row) -> list[float]:
    return [value for name, value in row.items() if name.isdecimal()]


def _by_workers(rows: list[Row], cell: Callable[..., str]) -> dict[str, Callable[..., object]]:
    counts = sorted(distinct(rows, "workers"))
    return {f"{n} workers": lambda each, n=n: cell(each, n) for n in counts}


def _accuracies(results: Path, optimizer: str, *, same_lr: bool) -> str:
    rows = where(read_rows(results / "convergence.csv"), optimizer=optimizer)
    lrs = chosen_lrs(read_rows(results / "convergence_tuning.csv"))

    def lr(method: str) -> float:
        return lrs[optimizer, DENSE if same_lr else method]

    def cell(method: str, n: int) -> str:
        own, dense = (
            by_seed(where(rows, workers=n, method=m, lr=lr(m)), "test") for m in (method, DENSE)
        )
        return _compared(own, dense, failed_below(dense), alone=method == DENSE)

    columns = {**_NAMED, "lr": lambda method: f"{lr(method):g}", **_by_workers(rows, cell)}
    return table(columns, distinct(rows, "method"))


def failed_below(dense: Mapping[int, float]) -> float:
    return spread(dense.values()).mean - FAILED


def _compared(
    own: Mapping[int, float], dense: Mapping[int, float], least: float, *, alone: bool
) -> str:
    """Return mean and deviation of the runs that did not fail, and their difference to dense."""
    finished = {seed: test for seed, test in own.items() if test >= least}
    failed = f"{len(own) - len(finished)} of {len(own)} failed"
    if not finished:
        return failed
    cell = spread(finished.values()).with_deviation()
    cell += "" if alone else f" ({paired(finished, dense).with_error()})"
    return cell if len(finished) == len(own) else f"{cell}, {failed}"


def speed_ratios(rows: list[Row], method: str, level: float) -> list[float]:
    """Return the steps to a training loss as multiples of dense training's, seed by seed."""
    ours, dense = (_reached(where(rows, method=m), level) for m in (method, DENSE))
    return [ours[seed] / dense[seed] for seed in ours if seed in dense]


def _reached(rows: list[Row], level: float) -> dict[int, float]:
    found = by_seed(rows, lambda row: epochs_to(row, level))
    return {seed: epochs for seed, epochs in found.items() if not math.isnan(epochs)}


def _speeds(results: Path, optimizer: str) -> str:
    """Return the steps to a training loss, as multiples of those of dense training, at its lr."""
    lr = chosen_lrs(read_rows(results / "convergence_tuning.csv"))[optimizer, DENSE]
    curves = read_rows(results / "convergence_curves.csv")
    rows = where(curves, optimizer=optimizer, lr=lr, quantity=QUANTITIES[0])

    def cell(each: tuple[str, float], n: int) -> str:
        method, level = each
        of_workers = where(rows, workers=n)
        runs = where(of_workers, method=method)
        ours, ratios = _reached(runs, level), speed_ratios(of_workers, method, level)
        reached = f"{len(ours)} of {len(runs)} reach it"
        if not ratios:
            return reached
        ratio = spread(ratios)
        # with_error() would give the ratio a sign.
        error = "" if math.isnan(ratio.error) else f" ± {ratio.error:.2f}"
        made = f"{ratio.mean:.2f}{error}"
        if method == DENSE:
            made = f"{spread(ours.values()).with_deviation(1)} epochs"
        return made if len(ours) == len(runs) else f"{made}, {reached}"

    columns: dict[str, Callable[[tuple[str, float]], str]] = {
        head: lambda each, name=name: name(each[0]) for head, name in _NAMED.items()
    }
    columns["loss"] = lambda each: f"{each[1]:g}"
    columns |= _by_workers(rows, cell)
    methods = distinct(curves, "method")
    return table(columns, [(method, level) for method in methods for level in LEVELS])


def _sets(results: Path) -> str:
    lrs = chosen_lrs(read_rows(results / "convergence_tuning.csv"))
    rows = [
        row
        for row in read_rows(results / "convergence.csv")
        if row["lr"] == lrs[row["optimizer"], row["method"]] and not math.isnan(row["computed"])
    ]

    def cell(method: str, n: int) -> str:
        own = where(rows, method=method, workers=n)
        return ", ".join(f"{over_seeds(own, name).mean:.0%}" for name in ("computed", "sent"))

    def span(method: str, low: str, high: str) -> str:
        own = where(rows, method=method)
        return f"{min(row[low] for row in own):.2g} to {max(row[high] for row in own):.2g}"

    columns = {**_NAMED, **_by_workers(rows, cell)}
    columns["final p"] = lambda method: span(method, "lowest_p", "highest_p")
    columns["L"] = lambda method: (
        span(method, "largest_norm", "largest_norm") if "Literal" in method else ""
    )
    return table(columns, distinct(rows, "method"))


# --- Large batch ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A method and an optimizer at the learning rate that the held-out images choose."""

    method: str
    optimizer: str
    lr: float
    tests: dict[float, dict[int, float]] = field(compare=False)
    least: float = 0.0

    @property
    def budget(self) -> float:
        return parse_method(self.method).budget

    @property
    def label(self) -> str:
        """A name for pictures and tables, without the budget."""
        return label_of(self.method, self.optimizer)

    def finished(self, lr: float | None = None) -> dict[int, float]:
        """Return the accuracies of the runs that did not fail, by seed."""
        tests = self.tests[lr or self.lr]
        return {seed: test for seed, test in tests.items() if test >= self.least}

    def failed(self, lr: float | None = None) -> int:
        return len(self.tests[lr or self.lr]) - len(self.finished(lr))

    @property
    def accuracy(self) -> Spread:
        """The test accuracy of the runs that did not fail; NaN if all did."""
        return spread(self.finished().values() or [math.nan])


def label_of(text: str, optimizer: str) -> str:
    method = parse_method(text)
    named = {"dense": "dense LARS", "topk": "ef(topk)"}.get(method.name, "")
    if isinstance(method, LayerSampling):
        named = "uniform dropping" if method.rule is None else "JointSpar-LARS"
        named += "" if method.topk is None else " + ef(topk)"
    return f"{named}, own norm" if optimizer == "lars-own" else named


def contenders_of(results: Path) -> list[Contender]:
    """Return each method and optimizer; dense training comes first."""
    rows = read_rows(results / "large_batch.csv")
    dense = where(rows, method=DENSE)
    least = failed_below(by_seed(where(dense, lr=best(dense, "lr", "validation")), "test"))
    found = []
    for (method, optimizer), own in grouped(rows, "method", "optimizer").items():
        lr = best(own, "lr", "validation")
        tests = {each: by_seed(runs, "test") for each, runs in grouped(own, "lr").items()}
        found.append(Contender(method, optimizer, lr, tests, least))
    return sorted(found, key=lambda each: each.method != DENSE)


def accuracy_table(results: Path) -> str:
    dense, *others = contenders_of(results)

    def cell(own: Contender) -> str:
        both = own.finished().keys() & dense.finished().keys()
        gap = f" ({paired(own.finished(), dense.finished()).with_error()})" if both else ""
        made = f"{own.accuracy.with_deviation()}{gap}, lr {own.lr:g}"
        count = len(own.tests[own.lr])
        return f"{made}, {own.failed()} of {count} failed" if own.failed() else made

    cells = {(each.budget, each.label): cell(each) for each in others}
    labels = list(dict.fromkeys(label for _, label in cells))
    rows = [
        [f"{budget:.0%}", *(cells.get((budget, label), "") for label in labels)]
        for budget in sorted({budget for budget, _ in cells})
    ]
    last = f"{dense.accuracy.with_deviation()}, lr {dense.lr:g}"
    rows.append(["100 %: dense LARS", last, *[""] * (len(labels) - 1)])
    return markdown_table(["bytes", *labels], rows)


def _pairs(results: Path) -> dict[float, dict[str, Contender]]:
    plain = [
        each
        for each in contenders_of(results)
        if each.method.startswith("jointspar") and "topk" not in each.method
    ]
    found: dict[float, dict[str, Contender]] = {}
    for each in sorted(plain, key=lambda each: each.budget):
        found.setdefault(each.budget, {})[each.label] = each
    return found


def _difference(pair: Sequence[Contender], lrs: Sequence[float]) -> str:
    (ours, theirs), (own_lr, their_lr) = pair, lrs
    finished, others = ours.finished(own_lr), theirs.finished(their_lr)
    cells = [paired(finished, others).with_error()] if finished.keys() & others.keys() else []
    failed = ours.failed(own_lr), theirs.failed(their_lr)
    return ", ".join([*cells, *([f"{failed[0]} and {failed[1]} failed"] if any(failed) else [])])


def learned_table(results: Path) -> str:
    """Return the paired differences of learned and uniform p, and the failed runs of both."""
    lrs = sorted({lr for each in contenders_of(results) for lr in each.tests})

    def pair(own: dict[str, Contender], norm: str) -> list[Contender]:
        return [own[f"{name}{norm}"] for name in ("JointSpar-LARS", "uniform dropping")]

    def own_norm(own: tuple[float, dict[str, Contender]]) -> str:
        both = pair(own[1], ", own norm")
        chosen = [each.lr for each in both]
        return f"{_difference(both, chosen)}, lr {chosen[0]:g} and {chosen[1]:g}"

    columns: dict[str, Callable[[tuple[float, dict[str, Contender]]], str]] = {
        "bytes": lambda own: f"{own[0]:.0%}",
        "running norm": lambda own: _difference(
            both := pair(own[1], ""), [each.lr for each in both]
        ),
        "own norm": own_norm,
    }
    for lr in lrs:
        columns[f"own norm, both {lr:g}"] = lambda own, lr=lr: _difference(
            pair(own[1], ", own norm"), (lr, lr)
        )
    return table(columns, _pairs(results).items())


def wall_clock_table(results: Path) -> str:
    rows = read_rows(results / "wall_clock.csv")
    seconds = {
        (parse_method(row["method"]).budget, label_of(row["method"], row["optimizer"])): row[
            "seconds"
        ]
        for row in rows
    }
    dense = seconds.pop((1.0, "dense LARS"))
    columns: dict[str, Callable[[float], str]] = {"bytes": lambda budget: f"{budget:.0%}"}
    for label in dict.fromkeys(label for _, label in seconds):
        columns[label] = lambda budget, label=label: (
            f"{seconds[budget, label]:.1f} s" if (budget, label) in seconds else ""
        )
    made = table(columns, sorted({budget for budget, _ in seconds}))
    return f"{made}\n| 100 %: dense LARS | {dense:.1f} s |{'  |' * (len(columns) - 2)}"


def bandit_table(results: Path) -> str:
    rows = read_rows(results / "bandit.csv")
    first, last = (name for name in rows[0] if name.startswith("excess_at_"))

    def percent(own: list[Row], name: str) -> str:
        share = over_seeds(own, lambda row: 100 * row[name])
        return f"{share.with_deviation(2 if share.mean < 2 else 0)} %"

    def steps(own: list[Row]) -> str:
        reached = [row["steps_to_2_percent"] for row in own]
        return "never" if "never" in reached else spread(reached).with_deviation(0)

    columns: dict[str, Callable[[list[Row]], object]] = {
        "form": lambda own: own[0]["form"],
        f"after {int(first[10:]):,} steps": lambda own: percent(own, first),
        "steps to 2 %": steps,
        f"{int(first[10:]):,} steps after a change of norms": lambda own: percent(own, last),
    }
    return table(columns, grouped(rows, "form").values())


def network_table(results: Path) -> str:

    def time(row: Row) -> str:
        low, middle, high = (row[f"step_ms{end}"] / 1000 for end in ("_low", "", "_high"))
        return f"{middle:.2f} s ({low:.2f} to {high:.2f})"

    columns = {"method": lambda row: f"`{row['method']}`", "time of a step": time}
    return table(columns, read_rows(results / "network_resnet18.csv"))


TABLES: dict[str, TableMaker] = {
    "accuracy": accuracy_table,
    "learned": learned_table,
    "wall_clock": wall_clock_table,
    "bandit": bandit_table,
    "network": network_table,
    "sets": _sets,
}
for _optimizer in ("sgd", "lars"):
    _own = partial(_accuracies, optimizer=_optimizer)
    TABLES[f"accuracy_{_optimizer}"] = partial(_own, same_lr=False)
    TABLES[f"same_lr_{_optimizer}"] = partial(_own, same_lr=True)
    TABLES[f"speed_{_optimizer}"] = partial(_speeds, optimizer=_optimizer)
