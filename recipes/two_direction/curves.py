"""Curves: f and its gap against what a worker sends and receives; as CSV and as a picture."""

import csv
from pathlib import Path
from typing import Any

from recipes.result_files import pyplot, write_csv
from recipes.two_direction.tuning import Point

_MOST_POINTS = 200
_HEADER = ["method", "iteration", "up", "down", "total", "bytes", "value", "gap"]
_AXES = {
    "up": "coordinates up",
    "down": "coordinates down",
    "total": "coordinates, up and down",
    "bytes": "bytes of the frames, up and down",
}
# A method has its colour in every picture.
_COLOURS = {
    "2Direction": "C0",
    "AGD": "C1",
    "EF21-P + DIANA": "C2",
    "AGD, three sequences": "C3",
    "DIANA": "C4",
    "EF21-P": "C5",
    "EF21": "C6",
    "EF14": "C7",
}
# The paper's; slower ones of the others are cut off where the slowest of these arrives.
_SHOWN_WHOLE = ("2Direction", "AGD", "EF21-P + DIANA")


def write_curves(path: Path, curves: dict[str, list[Point]], least: float) -> None:
    """Write some 200 points of each curve, the first and the last among them."""
    rows = [
        [method, *_cells(point, least)] for method, all_ in curves.items() for point in _some(all_)
    ]
    write_csv(path, _HEADER, rows)


def _some(curve: list[Point]) -> list[Point]:
    stride = -(-len(curve) // _MOST_POINTS)
    kept = curve[::stride]
    return kept if kept[-1] is curve[-1] else [*kept, curve[-1]]


def _cells(point: Point, least: float) -> list[object]:
    traffic = point.traffic
    sent = [traffic.up_coordinates, traffic.down_coordinates, traffic.coordinates, traffic.nbytes]
    return [point.iterations, *sent, f"{point.value:.12g}", f"{point.value - least:.6g}"]


def draw_curves(source: Path, title: str, gap: float) -> None:
    """Draw what :func:`write_curves` wrote: f and its gap by coordinates and bytes, beside it."""
    curves = _read(source)
    figure, axes = pyplot().subplots(2, 4, figsize=(20, 9), sharey="row", layout="constrained")
    for column, (quantity, label) in enumerate(_AXES.items()):
        for method, curve in curves.items():
            colour = _COLOURS[method]
            axes[0, column].plot(curve[quantity], curve["value"], colour, label=method)
            # The last point may lie below the gap, however little.
            heights = [max(height, gap / 10) for height in curve["gap"]]
            axes[1, column].plot(curve[quantity], heights, colour, label=method)
        whole = [curve[quantity][-1] for method, curve in curves.items() if method in _SHOWN_WHOLE]
        for each in axes[:, column]:
            _finish(each, label, max(whole, default=None))
    axes[0, 0].set_ylabel("f(x)")
    axes[1, 0].set_ylabel("f(x) − f*")
    axes[0, 0].legend(fontsize=9)
    figure.suptitle(title)
    figure.savefig(source.with_name(source.name.replace("_curves.csv", ".png")), dpi=80)
    pyplot().close(figure)


def _finish(axes: Any, label: str, most: float | None) -> None:
    axes.set_yscale("log")
    axes.set_xlabel(label)
    axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 4))
    axes.grid(True, alpha=0.3)
    if most is not None:
        axes.set_xlim(0, 1.05 * most)


def _read(source: Path) -> dict[str, dict[str, list[float]]]:
    with source.open(newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    curves: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        curve = curves.setdefault(row["method"], {name: [] for name in _HEADER[1:]})
        for name in _HEADER[1:]:
            curve[name].append(float(row[name]))
    return curves
