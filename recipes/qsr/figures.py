"""Two pictures: H and the learning rate against the step, accuracy against communication."""

from pathlib import Path
from typing import Any

import torchcomp
from recipes.qsr.comparison import METHODS, Comparison, Entry
from recipes.qsr.local_training import PARALLEL, rate_of
from recipes.result_files import pyplot, save_figure

_MARKERS = "os^D*vP"
# Points of accuracy below the best: what is further down would press the rest together.
_SHOWN = 8
_SHARES = (5, 10, 20, 50, 100)


def draw_schedules(comparison: Comparison, path: Path) -> None:
    """Draw every tuned method's H against the step, above the learning rate."""
    figure, (upper, lower) = pyplot().subplots(
        2, 1, figsize=(9, 6.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    for entry in comparison.entries:
        place = METHODS.index(entry.method)
        steps, periods = rounds(comparison, entry.schedule)
        schedule = "" if entry.schedule == PARALLEL else f": {entry.schedule}"
        # The first are the widest, so that lines that coincide are all seen.
        width = 1.2 + 0.8 * (len(METHODS) - 1 - place)
        upper.step(
            steps,
            periods,
            where="post",
            color=f"C{place}",
            linewidth=width,
            label=f"{entry.method}{schedule}",
        )
    upper.set_yscale("log")
    upper.yaxis.set_major_formatter("{x:,.0f}")
    upper.set_ylabel("H: local steps of the round (log scale)")
    upper.set_title("Length of the rounds, as tuned; the last one is cut at the end of the run")
    upper.legend(fontsize=8, loc="upper left")
    rate = rate_of(comparison.peak, comparison.total_steps, comparison.warmup_steps)
    every = range(comparison.total_steps)
    lower.plot(every, [rate(step) for step in every], color="black")
    lower.set_ylabel("learning rate")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(True, alpha=0.3)
    save_figure(figure, path)


def rounds(comparison: Comparison, schedule: str) -> tuple[list[int], list[int]]:
    """Return where rounds begin, and their lengths; the last is repeated at the end of the run."""
    total, warmup = comparison.total_steps, comparison.warmup_steps
    ends = torchcomp.sync_steps(
        "every(1)" if schedule == PARALLEL else schedule,
        lr=rate_of(comparison.peak, total, warmup),
        total_steps=total,
        warmup_steps=warmup,
    )
    starts = [0, *ends[:-1]]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    return [*starts, ends[-1]], [*lengths, lengths[-1]]


def draw_accuracy(comparison: Comparison, path: Path) -> None:
    """Draw accuracy against communication: tuned on the test part, the grid on validation."""
    figure, (left, right) = pyplot().subplots(
        1, 2, figsize=(12, 5), layout="constrained", sharex=True
    )
    total = comparison.total_steps
    floor = max(trial.accuracy for trial in comparison.trials) - _SHOWN
    for entry in comparison.entries:
        place = METHODS.index(entry.method)
        style = {"color": f"C{place}", "marker": _MARKERS[place], "linestyle": "none"}
        _draw_entry(left, entry, 100 * entry.syncs / total, style)
        tried = [
            t for t in comparison.trials if (t.method, t.lr) == (entry.method, comparison.peak)
        ]
        shares = [100 * trial.syncs / total for trial in tried]
        shown = [max(trial.accuracy, floor) for trial in tried]
        right.plot(shares, shown, label=entry.method, alpha=0.7, **style)
    seeds = len(comparison.entries[0].outcomes)
    left.set_title(f"test part: mean and deviation of {seeds} seeds; dots: seeds")
    right.set_title(f"validation part: every point of the grid; below {floor:.0f} %: on the edge")
    figure.suptitle(f"{comparison.dataset}, label noise {comparison.label_noise:g}")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(_SHARES, labels=[f"{share} %" for share in _SHARES])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("synchronisations in % of the steps (log scale)")
        axes.set_ylabel("accuracy, %")
        axes.grid(True, alpha=0.3)
    left.legend(fontsize=8, loc="lower left")
    save_figure(figure, path)


def _draw_entry(axes: Any, entry: Entry, share: float, style: dict[str, str]) -> None:
    values = [outcome.accuracy for outcome in entry.outcomes]
    axes.plot([share] * len(values), values, ".", color=style["color"], alpha=0.4)
    spread = entry.deviation if len(values) > 1 else None
    axes.errorbar(share, entry.accuracy, spread, capsize=5, label=entry.method, **style)
