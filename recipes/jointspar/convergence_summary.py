"""What the runs of the convergence experiment show: learning rates, accuracies and speed."""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

from recipes.jointspar.convergence_runs import QUANTITIES
from recipes.spread import spread

Row = Mapping[str, str]


def chosen_lrs(tuning: Iterable[Row]) -> dict[tuple[str, str], float]:
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
    return {
        key: max(by_lr, key=lambda lr, by_lr=by_lr: spread(by_lr[lr]).mean)
        for key, by_lr in found.items()
    }


def by_seed(rows: Iterable[Row], column: str, **wanted: object) -> dict[int, float]:
    """Return a column's values by seed, of the rows whose cells are as wanted."""
    return {
        int(row["seed"]): float(row[column])
        for row in rows
        if all(row[name] == str(value) for name, value in wanted.items())
    }


def finished(values: Mapping[int, float]) -> dict[int, float]:
    """Return the values of the runs that did not diverge."""
    return {seed: value for seed, value in values.items() if not math.isnan(value)}


def curves_by_seed(curves: Iterable[Row], quantity: str, **wanted: object) -> dict[int, list[float]]:
    """Return the values after each epoch by seed."""
    found = {}
    for row in curves:
        if row["quantity"] == quantity and all(row[k] == str(v) for k, v in wanted.items()):
            epochs = [name for name in row if name.isdecimal()]
            found[int(row["seed"])] = [float(row[epoch]) for epoch in epochs]
    return found


def epochs_to(losses: list[float], level: float) -> float:
    """Return the epochs until the training loss is first at most ``level``; NaN if it never is.

    Between two epochs, the logarithm of the loss is interpolated linearly.
    """
    if losses[0] <= level:
        return 1.0
    for epoch, (before, after) in enumerate(pairwise(losses), start=1):
        if after <= level < before:
            return epoch + math.log(before / level) / math.log(before / after)
    return math.nan


def epochs_by_seed(curves: Iterable[Row], level: float, **wanted: object) -> dict[int, float]:
    """Return the epochs to a level of the training loss, of the seeds that reach it."""
    losses = curves_by_seed(curves, QUANTITIES[0], **wanted)
    return finished({seed: epochs_to(each, level) for seed, each in losses.items()})
