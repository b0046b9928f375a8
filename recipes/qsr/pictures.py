"""The pictures, computed from the files of the results."""

from pathlib import Path

from recipes.pictures import MARKERS, Line, Panel, draw, spreads
from recipes.qsr.settings import MAIN_METHODS, METHODS, Setting
from recipes.qsr.tables import Results
from recipes.qsr.task import SAMPLES
from recipes.rows import grouped

_SHARES = (5, 10, 20, 50, 100)
_NAMES = {"mlp": "MLP", "vit": "ViT", "sgd": "SGD", "adamw": "AdamW"}


def name_of(setting: Setting) -> str:
    return (
        f"{_NAMES[setting.model]}, {_NAMES[setting.optimizer]}, {setting.decay}, "
        f"K = {setting.ranks}, {setting.epochs} epochs"
    )


def _with_qsr(results: Results) -> list[Setting]:
    return [each for each in results.settings() if results.reported(each, "QSR")]


def accuracy(folder: Path, path: Path) -> None:
    results, panels = Results(folder), []
    for same in grouped(map(vars, _with_qsr(results)), "model", "optimizer").values():
        setting, lines = Setting(**same[0]), []
        for index, method in enumerate(METHODS):
            if entry := results.reported(setting, method):
                share = 100 * entry.syncs / setting.total_steps(SAMPLES)
                style = {"color": f"C{index}", "marker": MARKERS[index], "linestyle": "none"}
                lines.append(spreads(method, {share: entry.accuracy}, standard=True, **style))
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
    if panels:
        draw(path, title, panels, size=(5, 4), columns=7)


def differences(folder: Path, path: Path) -> None:
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


PICTURES = {"accuracy": accuracy, "differences": differences}
