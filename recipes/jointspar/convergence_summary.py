"""What the runs of the convergence experiment show: learning rates, accuracies and speed."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from recipes.jointspar.methods import Dense, LayerSampling, parse_method
from recipes.jointspar.run_table import FAILED
from recipes.page_tables import markdown_table
from recipes.spread import paired, spread
from torchcomp.jointspar import Literal

Row = Mapping[str, str]
LrByMethod = Mapping[tuple[str, str], float]
"""Learning rates of one worker, by optimizer and method."""

# L is the largest norm seen so far, 1 to 13 here. In the bandit experiment's units, p_min^3 / L^2,
# this alpha is then 0.005 to 0.9, around the best of that experiment, 0.1.
PAPERS_RULE = Literal(1e-8)
DENSE = str(Dense())
PAPER = str(LayerSampling(0.6, selection="per-rank", rule=PAPERS_RULE))
OURS = str(LayerSampling(0.6, "bytes"))
QUANTITIES = ("train_loss", "test_accuracy")
LEVELS = (0.1, 0.01)
"""Training losses, in nats, that the steps of two methods are compared at."""


def name_of(text: str) -> str:
    """Return a short name of a method, without its budget."""
    method = parse_method(text)
    if not isinstance(method, LayerSampling):
        return method.name
    if method.rule is None:
        return "uniform, shared sets"
    rule = "paper's rule" if isinstance(method.rule, Literal) else "`Baseline`"
    sets = "shared sets" if method.shared else "per-rank sets"
    return f"{rule}, {sets}, {method.costs}"


def chosen_lrs(tuning: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Return the learning rate of one worker for each optimizer and method.

    It is the one with the best mean accuracy on held-out images over the worker counts and the
    tuning seeds. It is the same for all worker counts, since the paper scales it linearly.
    """
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for row in tuning:
        by_lr = found.setdefault((row["optimizer"], row["method"]), {})
        accuracy = float(row["validation"])
        # A run that diverged counts as 0 %. Leaving it out would favour unstable settings.
        by_lr.setdefault(float(row["lr"]), []).append(0.0 if math.isnan(accuracy) else accuracy)
    means = {
        key: {lr: spread(accuracies).mean for lr, accuracies in by_lr.items()}
        for key, by_lr in found.items()
    }
    return {key: max(by_lr, key=by_lr.__getitem__) for key, by_lr in means.items()}


def selected(rows: Sequence[Row], **wanted: object) -> list[Row]:
    """Return the rows whose cells are as wanted."""
    cells = {name: str(value) for name, value in wanted.items()}
    return [row for row in rows if all(row[name] == text for name, text in cells.items())]


def by_seed(rows: Sequence[Row], column: str) -> dict[int, float]:
    """Return a column's values by seed."""
    return {int(row["seed"]): float(row[column]) for row in rows}


def curves_by_seed(rows: Sequence[Row]) -> dict[int, list[float]]:
    """Return the values after each epoch by seed, of rows of one quantity."""
    epochs = [name for name in rows[0] if name.isdecimal()] if rows else []
    return {int(row["seed"]): [float(row[epoch]) for epoch in epochs] for row in rows}


def epochs_to(losses: Sequence[float], level: float) -> float:
    """Return the epochs until the training loss is first at most ``level``; NaN if it never is.

    Between two epochs, the logarithm of the loss is interpolated linearly.
    """
    if losses[0] <= level:
        return 1.0
    for epoch, (before, after) in enumerate(pairwise(losses), start=1):
        if after <= level < before:
            return epoch + math.log(before / level) / math.log(before / after)
    return math.nan


def accuracy_table(optimizer: str, runs: Sequence[Row], lrs: LrByMethod) -> str:
    """Return test accuracies and differences to dense training, each method at its own lr."""
    workers = _workers(runs)
    rows = []
    for method in _methods(runs):
        lr = lrs[optimizer, method]
        cells = [_accuracy_cell(optimizer, method, runs, lrs, count) for count in workers]
        rows.append([*_named(method), f"{lr:g}", *cells])
    return markdown_table(["method", "budget", "lr", *_heads(workers)], rows)


def same_lr_table(optimizer: str, runs: Sequence[Row], lrs: LrByMethod) -> str:
    """Return test accuracies and differences to dense training, all at dense training's lr."""
    return accuracy_table(optimizer, runs, {(name, m): lrs[name, DENSE] for name, m in lrs})


def speed_table(optimizer: str, curves: Sequence[Row], lrs: LrByMethod) -> str:
    """Return the steps to a level of the training loss, as multiples of those of dense training.

    All methods have the learning rate of dense training.
    """
    lr = lrs[optimizer, DENSE]
    workers = _workers(curves)
    of_lr = selected(curves, optimizer=optimizer, lr=lr, quantity=QUANTITIES[0])
    rows = []
    for method in _methods(curves):
        for level in LEVELS:
            cells = [_speed_cell(selected(of_lr, workers=n), method, level) for n in workers]
            rows.append([*_named(method), f"{level:g}", *cells])
    return markdown_table(["method", "budget", "loss", *_heads(workers)], rows)


def sets_table(runs: Sequence[Row], lrs: LrByMethod) -> str:
    """Return the layers computed and the bytes sent, the final p, and the largest norm L.

    The means and the ranges are over the runs with both optimizers, in which each method has its
    own learning rate. Runs that diverged are left out.
    """
    workers = _workers(runs)
    rows = []
    for method in _methods(runs):
        chosen = [
            row
            for row in selected(runs, method=method)
            if row["computed"] != "nan" and float(row["lr"]) == lrs[row["optimizer"], method]
        ]
        cells = []
        for count in workers:
            of_count = selected(chosen, workers=count)
            means = [spread(float(row[c]) for row in of_count).mean for c in ("computed", "sent")]
            cells.append(f"{means[0]:.0%}, {means[1]:.0%}")
        p, norm = (
            f"{min(float(row[low]) for row in chosen):.2g} to "
            f"{max(float(row[high]) for row in chosen):.2g}"
            for low, high in (("lowest_p", "highest_p"), ("largest_norm", "largest_norm"))
        )
        rows.append([*_named(method), *cells, p, norm if "Literal" in method else ""])
    return markdown_table(["method", "budget", *_heads(workers), "final p", "L"], rows)


def _accuracy_cell(
    optimizer: str, method: str, runs: Sequence[Row], lrs: LrByMethod, workers: int
) -> str:
    ours, dense = (
        by_seed(
            selected(runs, optimizer=optimizer, workers=workers, method=m, lr=lrs[optimizer, m]),
            "test",
        )
        for m in (method, DENSE)
    )
    least = spread(dense.values()).mean - FAILED
    finished = {seed: test for seed, test in ours.items() if test >= least}
    failed = f"{len(ours) - len(finished)} of {len(ours)} failed"
    if not finished:
        return failed
    cell = spread(finished.values()).with_deviation()
    if method != DENSE:
        cell += f" ({paired(finished, dense).with_error()})"
    return cell if len(finished) == len(ours) else f"{cell}, {failed}"


def speed_ratios(rows: Sequence[Row], method: str, level: float) -> list[float]:
    """Return the steps to a training loss as multiples of dense training's, seed by seed.

    Args:
        rows: curves of the training loss with one number of workers.
        method: the text of the method.
        level: the training loss. Seeds of which either run never reaches it are left out.
    """
    ours, dense = (_epochs_by_seed(selected(rows, method=m), level) for m in (method, DENSE))
    return [ours[seed] / dense[seed] for seed in ours if seed in dense]


def _speed_cell(rows: Sequence[Row], method: str, level: float) -> str:
    runs = selected(rows, method=method)
    ours = _epochs_by_seed(runs, level)
    reached = f"{len(ours)} of {len(runs)} reach it"
    ratios = speed_ratios(rows, method, level)
    if not ratios:
        return reached
    if method == DENSE:
        cell = f"{spread(ours.values()).with_deviation(1)} epochs"
    else:
        ratio = spread(ratios)
        # with_error() would give the ratio a sign.
        error = "" if math.isnan(ratio.error) else f" ± {ratio.error:.2f}"
        cell = f"{ratio.mean:.2f}{error}"
    return cell if len(ours) == len(runs) else f"{cell}, {reached}"


def _epochs_by_seed(rows: Sequence[Row], level: float) -> dict[int, float]:
    """Return the epochs to a training loss, of the seeds that reach it."""
    found = {seed: epochs_to(losses, level) for seed, losses in curves_by_seed(rows).items()}
    return {seed: epochs for seed, epochs in found.items() if not math.isnan(epochs)}


def _named(text: str) -> tuple[str, str]:
    return name_of(text), f"{parse_method(text).budget:.0%}"


def _methods(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _workers(rows: Sequence[Row]) -> list[int]:
    return sorted({int(row["workers"]) for row in rows})


def _heads(workers: Sequence[int]) -> list[str]:
    return [f"{count} workers" for count in workers]
