"""Two pictures: H and the learning rate against the step, accuracy against communication."""

from pathlib import Path
from typing import Any

import torchcomp
from recipes.qsr.comparison import METHODS, Comparison, Entry
from recipes.qsr.local_training import PARALLEL, lr_function
from recipes.result_files import pyplot, save_figure

_MARKERS = "os^D*vP"
# Show this many points of accuracy below the best. A larger range would press the rest together.
_SHOWN = 8
_SHARES = (5, 10, 20, 50, 100)


def draw_schedules(comparison: Comparison, path: Path) -> None:
    """Draw every tuned method's H against the step, above the learning rate."""
    figure, (upper, lower) = pyplot().subplots(
        2, 1, figsize=(9, 6.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    for entry in comparison.entries:
        index = METHODS.index(entry.method)
        steps, periods = rounds(comparison, entry.schedule)
        schedule = "" if entry.schedule == PARALLEL else f": {entry.schedule}"
        # Later lines are thinner and cover earlier ones, so that lines that coincide are all seen.
        width = 1.2 + 0.8 * (len(METHODS) - 1 - index)
        upper.step(
            steps,
            periods,
            where="post",
            color=f"C{index}",
            linewidth=width,
            label=f"{entry.method}{schedule}",
        )
    upper.set_yscale("log")
    upper.yaxis.set_major_formatter("{x:,.0f}")
    upper.set_ylabel("H: local steps of the round (log scale)")
    upper.set_title(schedules_title(comparison), fontsize=11)
    upper.legend(fontsize=8, loc="upper left")
    lr_at = lr_function(comparison.peak, comparison.total_steps, comparison.warmup_steps)
    steps = range(comparison.total_steps)
    lower.plot(steps, [lr_at(step) for step in steps], color="black")
    lower.set_ylabel("learning rate")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(True, alpha=0.3)
    save_figure(figure, path)


def schedules_title(comparison: Comparison) -> str:
    """Return how often QSR synchronises, and how its rounds grow."""
    qsr = comparison.entry("QSR")
    if qsr is None:
        return "Length of the rounds, as tuned (the end of the run cuts the last one)"
    _, lengths = rounds(comparison, qsr.schedule)
    total = comparison.total_steps
    return (
        f"QSR synchronises {qsr.syncs:,} times in {total:,} steps, {total / qsr.syncs:.1f}x less "
        f"often than parallel SGD\nRounds as tuned: QSR's grow from {lengths[0]:,} to "
        f"{max(lengths):,} steps (the end of the run cuts the last one)"
    )


def rounds(comparison: Comparison, schedule: str) -> tuple[list[int], list[int]]:
    """Return the steps at which rounds begin, and their lengths.

    The end of the run is the last step, with the last length again: a step plot needs it.
    """
    total, warmup = comparison.total_steps, comparison.warmup_steps
    ends = torchcomp.sync_steps(
        "every(1)" if schedule == PARALLEL else schedule,
        lr=lr_function(comparison.peak, total, warmup),
        total_steps=total,
        warmup_steps=warmup,
    )
    starts = [0, *ends[:-1]]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    return [*starts, ends[-1]], [*lengths, lengths[-1]]


def draw_accuracy(comparison: Comparison, path: Path) -> None:
    """Draw accuracy against communication: tuned on the test part, the grid on validation."""
    figure, (left, right) = pyplot().subplots(
        1, 2, figsize=(12, 5.3), layout="constrained", sharex=True
    )
    total = comparison.total_steps
    floor = max(trial.accuracy for trial in comparison.trials) - _SHOWN
    for entry in comparison.entries:
        index = METHODS.index(entry.method)
        style = {"color": f"C{index}", "marker": _MARKERS[index], "linestyle": "none"}
        _draw_entry(left, entry, 100 * entry.syncs / total, style)
        # Parallel training was also tried at other peak learning rates.
        tried = [
            t for t in comparison.trials if (t.method, t.lr) == (entry.method, comparison.peak)
        ]
        shares = [100 * trial.syncs / total for trial in tried]
        shown = [max(trial.accuracy, floor) for trial in tried]
        right.plot(shares, shown, label=entry.method, alpha=0.7, **style)
    seeds = len(comparison.entries[0].outcomes)
    spread = f"mean and deviation of {seeds} seeds; dots: single seeds"
    left.set_title(f"test images: {spread if seeds > 1 else 'one seed'}", fontsize=10)
    cut = f"below {floor:.0f} %: at the lower edge"
    right.set_title(f"validation images: every point of the grid; {cut}", fontsize=10)
    figure.suptitle(accuracy_title(comparison))
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(_SHARES, labels=[f"{share} %" for share in _SHARES])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("synchronisations in % of the steps (log scale)")
        axes.set_ylabel("accuracy, %")
        axes.grid(True, alpha=0.3)
    left.legend(fontsize=8, loc="lower left")
    save_figure(figure, path)


def accuracy_title(comparison: Comparison) -> str:
    """Return QSR's saving in bytes, and the difference of its accuracy to parallel training."""
    conditions = f"{comparison.dataset}, label noise {comparison.label_noise:g}"
    parallel, qsr = comparison.entry("parallel"), comparison.entry("QSR")
    # A single rank sends nothing, and neither does a run that diverged.
    if parallel is None or qsr is None or not qsr.nbytes:
        return f"Accuracy against communication ({conditions})"
    difference, error = qsr.ahead_of(parallel)
    spread = "" if len(qsr.outcomes) == 1 else f" ± {error:.2f}"
    return (
        f"QSR: {parallel.nbytes / qsr.nbytes:.1f}x fewer bytes than parallel SGD, "
        f"{qsr.accuracy:.2f} % against {parallel.accuracy:.2f} % accuracy\n"
        f"difference paired by seed: {difference:+.2f}{spread} points ({conditions})"
    )


def _draw_entry(axes: Any, entry: Entry, share: float, style: dict[str, str]) -> None:
    values = [outcome.accuracy for outcome in entry.outcomes]
    axes.plot([share] * len(values), values, ".", color=style["color"], alpha=0.4)
    deviation = entry.deviation if len(values) > 1 else None
    axes.errorbar(share, entry.accuracy, deviation, capsize=5, label=entry.method, **style)
