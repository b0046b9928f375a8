"""The pictures, computed from the files of the results."""

from collections.abc import Sequence
from pathlib import Path

import torchcomp
from recipes.pictures import MARKERS, Cells, Line, Panel, draw, spreads
from recipes.qsr.settings import MAIN_METHODS, METHODS, Setting
from recipes.qsr.tables import Entry, Results
from recipes.qsr.task import SAMPLES
from recipes.rows import grouped, over_seeds, where
from torchcomp.local_sgd.schedules import QSR

_SHARES = (5, 10, 20, 50, 100)
# A map's colours end this many points below its best cell. Worse cells would press them together.
_SHOWN = 5
_NAMES = {"mlp": "MLP", "vit": "ViT", "sgd": "SGD", "adamw": "AdamW"}


def name_of(setting: Setting) -> str:
    """Return a setting's title: model, optimizer, decay, workers and epochs."""
    return (
        f"{_NAMES[setting.model]}, {_NAMES[setting.optimizer]}, {setting.decay}, "
        f"K = {setting.ranks}, {setting.epochs} epochs"
    )


def _with_qsr(results: Results) -> list[Setting]:
    return [each for each in results.settings() if results.reported(each, "QSR")]


def _detailed(results: Results) -> list[Setting]:
    """Return the settings that have curves."""
    return [each for each in _with_qsr(results) if where(results.curves, **vars(each))]


def _entries(results: Results, setting: Setting) -> list[Entry]:
    return [entry for each in METHODS if (entry := results.reported(setting, each))]


def accuracy(folder: Path, path: Path) -> None:
    """Draw every method's accuracy against its communication, one panel per setting."""
    results, panels = Results(folder), []
    for setting in _detailed(results):
        lines = []
        for entry in _entries(results, setting):
            index = METHODS.index(entry.point.method)
            share = 100 * entry.syncs / setting.total_steps(SAMPLES)
            style = {"color": f"C{index}", "marker": MARKERS[index], "linestyle": "none"}
            points = {share: entry.accuracy}
            lines.append(spreads(entry.point.method, points, standard=True, **style))
        panels.append(
            Panel(
                x="averages in % of the steps (log scale)",
                y="" if panels else "test accuracy, %",
                title=name_of(setting),
                lines=lines,
                log="x",
                xticks={share: f"{share} %" for share in _SHARES},
            )
        )
    title = "Accuracy against communication, as tuned: mean and standard error"
    _draw(path, title, panels, columns=7)


def curves(folder: Path, path: Path) -> None:
    """Draw the accuracy of the averaged model against the step, one panel per setting."""
    results, panels = Results(folder), []
    for setting in _detailed(results):
        lines = []
        for method in MAIN_METHODS:
            rows = where(results.curves, method=method, **vars(setting))
            steps = {
                s: over_seeds(own, "accuracy") for s, own in sorted(grouped(rows, "step").items())
            }
            means, index = [each.mean for each in steps.values()], METHODS.index(method)
            style = {"color": f"C{index}", "marker": MARKERS[index]}
            errors = [each.error for each in steps.values()]
            lines.append(Line(method, list(steps), means, errors, style, band=True))
        y = "" if panels else "test accuracy of the averaged model, %"
        panels.append(Panel("step", y, name_of(setting), lines))
    _draw(path, "Accuracy during the run: mean over the seeds, with its standard error", panels)


def map_cells(results: Results, setting: Setting) -> dict[tuple[int, float], Entry]:
    """Return the points of QSR that were tried, by H_base and alpha / peak learning rate."""
    cells = {}
    chosen = results.reported(setting, "QSR")
    for entry in results.entries(setting, "validation", "QSR"):
        schedule = torchcomp.parse(entry.point.schedule)
        assert isinstance(schedule, QSR)
        # Tuning tried other weight decays, too.
        if chosen and entry.point.weight_decay == chosen.point.weight_decay:
            cells[schedule.h_base, round(schedule.alpha / entry.point.lr, 3)] = entry
    bases, ratios = ({key[axis] for key in cells} for axis in (0, 1))
    # The points of tuning alone are no map.
    return cells if len(cells) == len(bases) * len(ratios) and len(ratios) > 1 else {}


def maps(folder: Path, path: Path) -> None:
    """Draw validation accuracy and communication against H_base and alpha."""
    results, rows = Results(folder), []
    for setting in _with_qsr(results):
        if cells := map_cells(results, setting):
            best = max(entry.accuracy.mean for entry in cells.values())
            found = {cell: entry.accuracy.mean for cell, entry in cells.items()}
            total = setting.total_steps(SAMPLES)
            shares = {cell: 100 * entry.syncs / total for cell, entry in cells.items()}
            left = _map(found, f"{name_of(setting)}: accuracy, %", best - _SHOWN)
            rows.append([left, _map(shares, "averages in % of the steps", 0.0)])
    if rows:
        title = "QSR by H_base and alpha, mean over the seeds for tuning"
        draw(path, title, *rows, size=(5, 3.3))


def _map(values: dict[tuple[int, float], float], title: str, floor: float) -> Panel:
    bases, ratios = (sorted({key[axis] for key in values}) for axis in (0, 1))
    table = [[values[base, ratio] for ratio in ratios] for base in bases]
    return Panel(
        x="alpha / peak learning rate",
        y="H_base",
        title=title,
        cells=Cells(table, [[f"{v:.1f}" for v in row] for row in table], {"vmin": floor}),
        xticks={x: f"{ratio:g}" for x, ratio in enumerate(ratios)},
        yticks={y: str(base) for y, base in enumerate(bases)},
    )


def differences(folder: Path, path: Path) -> None:
    """Draw QSR's difference to parallel training and to constant H in each setting."""
    results = Results(folder)
    found = {each: own for each in _with_qsr(results) if (own := results.main(each))}
    if not found:
        return
    lines = []
    for index, offset in ((0, 0.12), (1, -0.12)):
        gaps = [entries[2].ahead_of(entries[index]) for entries in found.values()]
        style = {"color": f"C{index}", "marker": MARKERS[index], "linestyle": "none"}
        means = [gap.mean for gap in gaps]
        errors = [0.0 if gap.error != gap.error else gap.error for gap in gaps]
        places = [offset - row for row in range(len(gaps))]
        label = f"QSR − {MAIN_METHODS[index]}"
        lines.append(Line(label, means, places, errors, style, sideways=True))
    names = [f"{name_of(each)}{'' if each.label_noise else ', clean'}" for each in found]
    panel = Panel(
        x="difference in test accuracy, points (paired by seed, with its standard error)",
        lines=lines,
        yticks={-row: name for row, name in enumerate(names)},
        xmarks=[0],
    )
    title = "QSR's accuracy minus that of the others, each tuned"
    draw(path, title, [panel], size=(9, 0.6 + 0.42 * len(found)))


def _draw(path: Path, title: str, panels: Sequence[Panel], columns: int = 4) -> None:
    if panels:
        draw(path, title, panels, size=(5, 4), columns=columns)


PICTURES = {
    "accuracy": accuracy,
    "curves": curves,
    "maps": maps,
    "differences": differences,
}
