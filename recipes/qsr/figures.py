"""The pictures, computed from the files of the results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torchcomp
from recipes.qsr.results import Entry, Results, read_results
from recipes.qsr.settings import MAIN_METHODS, METHODS, Setting
from recipes.qsr.training import PARALLEL
from recipes.result_files import pyplot, save_figure
from recipes.spread import spread
from torchcomp.schedules import QSR

_MARKERS = "os^D*vP"
_SHARES = (5, 10, 20, 50, 100)
# A map's colours end this many points below its best cell. Worse cells would press them together.
_SHOWN = 5
_MODELS = {"mlp": "MLP", "vit": "ViT", "cnn": "CNN"}
_OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}


def draw_all(folder: Path, samples: int) -> None:
    """Draw every picture that the files of a folder have results for.

    Args:
        folder: of the files, and of the pictures.
        samples: number of training images.
    """
    results = read_results(folder)
    chosen = [each for each in results.settings() if results.reported(each, "QSR")]
    detailed = [each for each in chosen if any(curve.setting == each for curve in results.curves)]
    mapped = [each for each in chosen if map_cells(results, each)]
    if detailed:
        draw_schedules(results, detailed[0], samples, folder / "schedules.png")
        draw_accuracy(results, detailed, samples, folder / "accuracy.png")
        draw_curves(results, detailed, folder / "curves.png")
    if mapped:
        draw_maps(results, mapped, folder / "maps.png")
    if complete := {each: found for each in chosen if (found := results.main(each))}:
        draw_differences(complete, folder / "differences.png")


def name_of(setting: Setting) -> str:
    """Return a setting's title: model, optimizer, decay, workers and epochs."""
    return (
        f"{_MODELS[setting.model]}, {_OPTIMIZERS[setting.optimizer]}, {setting.decay}, "
        f"K = {setting.ranks}, {setting.epochs} epochs"
    )


def draw_schedules(results: Results, setting: Setting, samples: int, path: Path) -> None:
    """Draw every tuned method's H against the step, above the learning rate."""
    figure, (upper, lower) = pyplot().subplots(
        2, 1, figsize=(9, 6.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    entries = _reported(results, setting, METHODS)
    for entry in entries:
        index = METHODS.index(entry.point.method)
        steps, periods = rounds(entry, samples)
        schedule = "" if entry.point.schedule == PARALLEL else f": {entry.point.schedule}"
        # Later lines are thinner and cover earlier ones, so that lines that coincide are all seen.
        width = 1.2 + 0.8 * (len(METHODS) - 1 - index)
        label = f"{entry.point.method}{schedule}"
        upper.step(steps, periods, where="post", color=f"C{index}", linewidth=width, label=label)
    upper.set_yscale("log")
    upper.yaxis.set_major_formatter("{x:,.0f}")
    upper.set_ylabel("H: local steps of the round (log scale)")
    upper.set_title(
        f"Rounds as tuned ({name_of(setting)}; the end of the run cuts the last)", fontsize=11
    )
    upper.legend(fontsize=8, loc="upper left")
    lr_at = setting.lr_function(entries[0].point.lr, samples)
    lower.plot([lr_at(step) for step in range(setting.total_steps(samples))], color="black")
    lower.set_ylabel("learning rate")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(True, alpha=0.3)
    save_figure(figure, path)


def rounds(entry: Entry, samples: int) -> tuple[list[int], list[int]]:
    """Return the steps at which an entry's rounds begin, and their lengths.

    The end of the run is the last step, with the last length again: a step plot needs it.
    """
    setting, schedule = entry.setting, entry.point.schedule
    ends = torchcomp.sync_steps(
        "every(1)" if schedule == PARALLEL else schedule,
        lr=setting.lr_function(entry.point.lr, samples),
        total_steps=setting.total_steps(samples),
        warmup_steps=setting.warmup_steps(samples),
    )
    starts = [0, *ends[:-1]]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    return [*starts, ends[-1]], [*lengths, lengths[-1]]


def draw_accuracy(results: Results, settings: Sequence[Setting], samples: int, path: Path) -> None:
    """Draw every method's accuracy against its communication, one panel per setting."""
    figure, panels = _panels(len(settings))
    for axes, setting in zip(panels, settings, strict=True):
        entries = _reported(results, setting, METHODS)
        for entry in entries:
            index = METHODS.index(entry.point.method)
            share = 100 * entry.syncs / setting.total_steps(samples)
            axes.errorbar(
                *(share, entry.accuracy.mean, entry.accuracy.error),
                **{"color": f"C{index}", "marker": _MARKERS[index], "linestyle": "none"},
                capsize=4,
                label=entry.point.method,
            )
        axes.set_xscale("log")
        axes.set_xticks(_SHARES, labels=[f"{share} %" for share in _SHARES])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("averages in % of the steps (log scale)")
        axes.set_title(name_of(setting), fontsize=9)
    panels[0].set_ylabel("test accuracy, %")
    panels[0].legend(fontsize=8)
    count = entries[0].accuracy.count
    figure.suptitle(
        f"Accuracy against communication, as tuned: mean and standard error of {count} seeds"
    )
    save_figure(figure, path)


def draw_curves(results: Results, settings: Sequence[Setting], path: Path) -> None:
    """Draw the accuracy of the averaged model against the step, one panel per setting."""
    figure, panels = _panels(len(settings))
    for axes, setting in zip(panels, settings, strict=True):
        for method in MAIN_METHODS:
            runs = [
                points
                for curve, points in results.curves.items()
                if (curve.setting, curve.method) == (setting, method)
            ]
            steps = sorted({step for points in runs for step in points})
            spreads = [spread(points[step] for points in runs if step in points) for step in steps]
            middle = [each.mean for each in spreads]
            index = METHODS.index(method)
            axes.plot(
                steps, middle, _MARKERS[index], linestyle="-", ms=4, c=f"C{index}", label=method
            )
            low = [each.mean - each.error for each in spreads]
            high = [each.mean + each.error for each in spreads]
            axes.fill_between(steps, low, high, color=f"C{index}", alpha=0.2, linewidth=0)
        axes.set_xlabel("step")
        axes.set_title(name_of(setting), fontsize=9)
    panels[0].set_ylabel("test accuracy of the averaged model, %")
    panels[0].legend(fontsize=8)
    figure.suptitle("Accuracy during the run: mean over the seeds, with its standard error")
    save_figure(figure, path)


def map_cells(results: Results, setting: Setting) -> dict[tuple[int, float], Entry]:
    """Return the points of QSR that were tried, by H_base and alpha / peak learning rate."""
    cells = {}
    chosen = results.reported(setting, "QSR")
    for entry in results.tried(setting, "QSR"):
        schedule = torchcomp.parse(entry.point.schedule)
        assert isinstance(schedule, QSR)
        # Tuning tried other weight decays, too.
        if chosen and entry.point.weight_decay == chosen.point.weight_decay:
            cells[schedule.h_base, round(schedule.alpha / entry.point.lr, 3)] = entry
    bases = {h_base for h_base, _ in cells}
    ratios = {ratio for _, ratio in cells}
    # The points of tuning alone are no map.
    return cells if len(cells) == len(bases) * len(ratios) and len(ratios) > 1 else {}


def draw_maps(results: Results, settings: Sequence[Setting], path: Path) -> None:
    """Draw validation accuracy and communication against H_base and alpha."""
    figure, panels = pyplot().subplots(
        len(settings), 2, figsize=(10, 3.6 * len(settings)), layout="constrained", squeeze=False
    )
    for (left, right), setting in zip(panels, settings, strict=True):
        cells = map_cells(results, setting)
        total = results.tried(setting, "parallel")[0].syncs
        accuracy = {cell: entry.accuracy.mean for cell, entry in cells.items()}
        _draw_map(left, accuracy, "{:.1f}", floor=max(accuracy.values()) - _SHOWN)
        share = {cell: 100 * entry.syncs / total for cell, entry in cells.items()}
        _draw_map(right, share, "{:.1f}", floor=0.0)
        left.set_title(f"{name_of(setting)}: accuracy, %", fontsize=9)
        right.set_title("averages in % of the steps", fontsize=9)
    count = next(iter(cells.values())).accuracy.count
    figure.suptitle(f"QSR by H_base and alpha, mean over {count} seeds for tuning")
    save_figure(figure, path)


def _draw_map(
    axes: Any, values: dict[tuple[int, float], float], form: str, *, floor: float
) -> None:
    bases, ratios = sorted({base for base, _ in values}), sorted({ratio for _, ratio in values})
    table = [[values[base, ratio] for ratio in ratios] for base in bases]
    axes.imshow(table, cmap="viridis", vmin=floor, aspect="auto", origin="lower")
    middle = (floor + max(values.values())) / 2
    for row, cells in enumerate(table):
        for column, value in enumerate(cells):
            color = "white" if value < middle else "black"
            axes.text(column, row, form.format(value), ha="center", va="center", color=color)
    axes.set_xticks(range(len(ratios)), labels=[f"{ratio:g}" for ratio in ratios])
    axes.set_yticks(range(len(bases)), labels=bases)
    axes.set_xlabel("alpha / peak learning rate")
    axes.set_ylabel("H_base")


def draw_differences(entries: Mapping[Setting, Sequence[Entry]], path: Path) -> None:
    """Draw QSR's difference to parallel training and to constant H.

    Args:
        entries: parallel training, constant H and QSR in each setting.
        path: of the picture.
    """
    height = 1.6 + 0.42 * len(entries)
    figure, axes = pyplot().subplots(figsize=(9, height), layout="constrained")
    for row, (*others, qsr) in enumerate(entries.values()):
        for offset, other in zip((-0.12, 0.12), others, strict=True):
            index = METHODS.index(other.point.method)
            gap = qsr.ahead_of(other)
            axes.errorbar(
                *(gap.mean, row + offset),
                xerr=gap.error,
                fmt=_MARKERS[index],
                color=f"C{index}",
                capsize=3,
                label=f"QSR − {other.point.method}" if row == 0 else None,
            )
    labels = [f"{name_of(each)}{'' if each.label_noise else ', clean'}" for each in entries]
    axes.set_yticks(range(len(labels)), labels=labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=1)
    axes.set_xlabel("difference in test accuracy, points (paired by seed, with its standard error)")
    axes.set_title("QSR's accuracy minus that of the others, each tuned", fontsize=11)
    axes.grid(True, axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, path)


def _reported(results: Results, setting: Setting, methods: Sequence[str]) -> list[Entry]:
    return [entry for each in methods if (entry := results.reported(setting, each))]


def _panels(count: int) -> tuple[Any, Sequence[Any]]:
    figure, (panels,) = pyplot().subplots(
        1, count, figsize=(max(8.0, 5.0 * count), 4.6), layout="constrained", squeeze=False
    )
    for axes in panels:
        axes.grid(True, alpha=0.3)
    return figure, panels
