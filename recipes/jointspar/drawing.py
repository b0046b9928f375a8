"""The pictures of the training runs."""

import json
from pathlib import Path
from typing import Any

from recipes.jointspar.methods import Dense, LayerSampling, TopK
from recipes.jointspar.run_table import Contender, Summary, contender_of
from recipes.result_files import pyplot, read_csv, save_figure

_MARKERS = "osDv^P*X"
_DENSE = Dense()


def draw_accuracy(rows: list[Summary], path: Path) -> None:
    """Draw test accuracy against the share of bytes sent, with the deviation over the seeds.

    Runs that failed are left out. Their number is written next to the point.
    """
    figure, axes = pyplot().subplots(figsize=(9, 5.4), layout="constrained")
    dense = dense_of(rows)
    labels = dict.fromkeys(row.contender.label for row in rows if row is not dense)
    mean, deviation = dense.accuracy.mean, dense.accuracy.deviation
    axes.axhspan(mean - deviation, mean + deviation, color="0.9")
    axes.axhline(mean, color="black", linewidth=1, label="dense LARS, ± 1 deviation")
    for index, (label, marker) in enumerate(zip(labels, _MARKERS, strict=False)):
        # Sorted by bytes, so that the line does not turn back.
        group = sorted(
            (row for row in rows if row.contender.label == label), key=lambda row: row.bytes_share
        )
        # Moved apart: methods with the same budget would hide each other.
        shares = [100 * row.bytes_share + 0.8 * (index - len(labels) / 2) for row in group]
        means = [row.accuracy.mean for row in group]
        deviations = [row.accuracy.deviation for row in group]
        color = f"C{index}"
        style = {"fmt": marker + "-", "color": color, "capsize": 4, "label": label}
        axes.errorbar(shares, means, deviations, **style)
        for row, x, y in zip(group, shares, means, strict=True):
            _note_failures(axes, row, (x, y), color)
    axes.set_xlim(left=0)
    axes.set_xlabel("bytes sent, % of dense DDP's (methods moved apart)")
    axes.set_ylabel(f"test accuracy of runs that did not fail, % ({len(dense.tests)} seeds)")
    axes.set_title(_accuracy_title(rows, dense), fontsize=11)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    save_figure(figure, path)


def dense_of(rows: list[Summary]) -> Summary:
    """Return the summary of dense training."""
    return next(row for row in rows if row.contender.method == _DENSE)


def _accuracy_title(rows: list[Summary], dense: Summary) -> str:
    """State how far JointSpar-LARS is from dense training, with standard errors."""
    wanted = {Contender(LayerSampling(budget, "bytes")): budget for budget in (0.6, 0.3)}
    differences = [
        f"{difference.with_error()} points at {wanted[row.contender]:.0%} of the bytes"
        for row in rows
        if row.contender in wanted and (difference := row.against(dense))
    ]
    return f"JointSpar-LARS, compared with dense LARS (± standard error):\n{', '.join(differences)}"


def draw_wall_clock(table: Path, rows: list[Summary], path: Path) -> None:
    """Draw test accuracy against the seconds of a whole run on the shaped network.

    Args:
        table: ``wall_clock.csv``.
        rows: the contenders with the accuracies of all seeds.
        path: path of the picture.
    """
    times = read_csv(table)
    seconds = {contender_of(row): float(row["seconds"]) for row in times}
    rows = [row for row in rows if row.contender in seconds]
    figure, axes = pyplot().subplots(figsize=(11, 6), layout="constrained")
    # Budgets are marker shapes, because texts next to the points would overlap.
    budgets = sorted({row.contender.method.budget for row in rows})
    markers = dict(zip(budgets, _MARKERS, strict=False))
    for index, label in enumerate(dict.fromkeys(row.contender.label for row in rows)):
        group = [row for row in rows if row.contender.label == label]
        _draw_group(axes, group, seconds, markers, f"C{index}")
    for budget, marker in markers.items():
        axes.plot([], [], marker, color="0.4", label=f"budget {budget:.0%}")
    axes.set_xlim(left=0)
    axes.set_xlabel(f"seconds of a run (one run), two hosts at {times[0]['mbit']} Mbit/s")
    axes.set_ylabel("test accuracy of runs that did not fail, % (all seeds)")
    axes.set_title(_wall_clock_title(rows, seconds), fontsize=11)
    axes.grid(True, alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    save_figure(figure, path)


def _wall_clock_title(rows: list[Summary], seconds: dict[Contender, float]) -> str:
    dense = seconds[dense_of(rows).contender]
    named = {
        "JointSpar-LARS, 60% of the bytes": LayerSampling(0.6, "bytes"),
        "ef(topk), 5%": TopK(0.05),
    }
    shares = [
        f"{seconds[Contender(method)] / dense:.0%} ({name})"
        for name, method in named.items()
        if Contender(method) in seconds
    ]
    return f"Time of a run as a share of dense LARS's: {', '.join(shares)}"


def _draw_group(
    axes: Any,
    group: list[Summary],
    seconds: dict[Contender, float],
    markers: dict[float, str],
    color: str,
) -> None:
    """Draw a method's points, joined in the order of their budgets."""
    group = sorted(group, key=lambda row: row.contender.method.budget)
    times = [seconds[row.contender] for row in group]
    means = [row.accuracy.mean for row in group]
    axes.plot(times, means, color=color, linewidth=1.2, label=group[0].contender.label)
    for row, x, y in zip(group, times, means, strict=True):
        marker = markers[row.contender.method.budget]
        axes.errorbar(x, y, row.accuracy.deviation, fmt=marker, color=color, capsize=4)
        _note_failures(axes, row, (x, y), color)


def _note_failures(axes: Any, row: Summary, point: tuple[float, float], color: str) -> None:
    if row.failed:
        text = f"{row.failed} of {len(row.tests)} failed"
        place = {"xytext": (8, -14), "textcoords": "offset points"}
        axes.annotate(text, point, fontsize=8, color=color, **place)


def draw_probabilities(metrics: Path, path: Path) -> None:
    """Draw a heat map of the probabilities of all layers over time, and the kept layers.

    Args:
        metrics: lines of :meth:`torchcomp.jointspar.JointSparStats.row`, one per step.
        path: path of the picture.
    """
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    layers = list(rows[0]["p"])
    p = [[row["p"][layer] for row in rows] for layer in layers]
    kept = [[layer in row["kept"] for row in rows] for layer in layers]
    height = 1.6 + 0.2 * len(layers)
    figure, axes = pyplot().subplots(1, 2, figsize=(13, height), layout="constrained", sharey=True)
    options = {"aspect": "auto", "interpolation": "nearest", "vmin": 0, "vmax": 1}
    image = axes[0].imshow(p, cmap="viridis", **options)
    # Above the bar: next to it, the name would seem to belong to the other panel.
    figure.colorbar(image, ax=axes[0]).ax.set_title("p", fontsize=10)
    axes[1].imshow(kept, cmap="Greys", **options)
    for each, title in zip(axes, ("probability p of each layer", "kept (black)"), strict=True):
        each.set_title(title, fontsize=10)
        each.set_xlabel("step")
    axes[0].set_yticks(range(len(layers)), layers, fontsize=8)
    axes[0].set_ylabel("layer, from the input down to the output")
    figure.suptitle(_probabilities_title(rows))
    save_figure(figure, path)


def _probabilities_title(rows: list[dict[str, Any]]) -> str:
    kept = sum(len(row["kept"]) for row in rows) / (len(rows) * len(rows[0]["p"]))
    last = rows[-1]["p"]
    title = (
        f"JointSpar keeps {kept:.0%} of the layers over {len(rows)} steps; final p from "
        f"{min(last.values()):.2f} to {max(last.values()):.2f}"
    )
    sent, dense = (rows[-1].get(name) for name in ("total_bytes_sent", "total_dense_bytes_sent"))
    return f"{title}; {dense / sent:.1f}x fewer bytes than dense" if sent and dense else title
