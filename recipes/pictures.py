"""Pictures, declared as panels of lines, and drawn by one function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

from recipes.rows import Spread

Picture = Callable[[Path, Path], object]
"""From the folder of the results and the path of the picture."""
MARKERS = "osD^vP*X"


@dataclass(frozen=True)
class Line:
    """Points of a panel. ``style`` has matplotlib's names, and ``band`` draws errors as an area."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None
    style: Mapping[str, Any] = field(default_factory=dict)
    band: bool = False
    sideways: bool = False  # the errors are those of x
    notes: Sequence[str] = ()  # beside the points


def spreads(
    label: str,
    points: Mapping[float, Spread],
    scale: float = 1.0,
    standard: bool = False,
    **style: Any,
) -> Line:
    """Return a line of means with their deviations or, if ``standard``, standard errors."""
    errors = [each.error if standard else each.deviation for each in points.values()]
    # A single value has no deviation.
    shown = [0.0 if error != error else scale * error for error in errors]
    means = [scale * each.mean for each in points.values()]
    return Line(label, list(points), means, shown, style)


@dataclass(frozen=True)
class Panel:
    """One plot. ``log`` names its logarithmic axes; ``ticks`` are texts by position."""

    x: str = ""
    y: str = ""
    title: str = ""
    lines: Sequence[Line] = ()
    log: str = ""
    xticks: Mapping[float, str] | None = None
    yticks: Mapping[float, str] | None = None
    xlim: tuple[float | None, float | None] = (None, None)
    ylim: tuple[float | None, float | None] = (None, None)
    xmarks: Sequence[float] = ()  # vertical lines
    ymarks: Sequence[float] = ()  # horizontal lines
    note: str = ""  # in the upper right corner
    legend: bool = False  # inside; without one, the picture has a common legend below


def draw(
    path: Path,
    title: str,
    *rows: Sequence[Panel],
    size: tuple[float, float] = (4.6, 4.2),
    columns: int = 4,
    dpi: int = 90,
) -> None:
    """Draw rows of panels, each of ``size`` inches, below a title."""
    import matplotlib

    # A backend that needs no display.
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    width = max(map(len, rows))
    figure, axes = plt.subplots(
        *(len(rows), width),
        figsize=(max(8.0, size[0] * width), size[1] * len(rows) + 1),
        layout="constrained",
        squeeze=False,
    )
    lines = [wrap(line, int(12 * figure.get_figwidth())) for line in title.splitlines()]
    figure.suptitle("\n".join(text for line in lines for text in line), fontsize=11)
    common: dict[str, Any] = {}
    for line, panels in zip(axes, rows, strict=True):
        for each, panel in zip(line, panels, strict=True):
            _draw(each, panel)
            if panel.legend:
                each.legend(fontsize=8)
            else:
                handles, labels = each.get_legend_handles_labels()
                common |= dict(zip(labels, handles, strict=True))
    if common:
        place = "outside lower center"
        figure.legend(common.values(), common, loc=place, ncols=columns, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)  # which frees its memory


def _draw(axes: Any, panel: Panel) -> None:
    axes.grid(True, alpha=0.3)
    for line in panel.lines:
        _draw_line(axes, line)
    for place in panel.xmarks:
        axes.axvline(place, color="0.5", linestyle=":", linewidth=1)
    for place in panel.ymarks:
        axes.axhline(place, color="0.5", linestyle=":", linewidth=1)
    for name, axis, ticks in (("x", axes.xaxis, panel.xticks), ("y", axes.yaxis, panel.yticks)):
        if name in panel.log:
            _logarithmic(axes, axis, name)
        if ticks is not None:
            axis.set_ticks(list(ticks), labels=list(ticks.values()), fontsize=8)
            axis.set_ticks([], minor=True)
    axes.set_xlim(*panel.xlim)
    axes.set_ylim(*panel.ylim)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.set_title(panel.title, fontsize=9)
    place = {"ha": "right", "va": "top", "transform": axes.transAxes}
    axes.text(0.98, 0.97, panel.note, fontsize=7.5, color="0.35", **place)


def _logarithmic(axes: Any, axis: Any, name: str) -> None:
    from matplotlib.ticker import LogFormatter

    getattr(axes, f"set_{name}scale")("log")
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(LogFormatter())


def _draw_line(axes: Any, line: Line) -> None:
    style = {"linewidth": 1.3, "markersize": 5, **line.style}
    if line.error is None or line.band:
        (drawn,) = axes.plot(line.x, line.y, label=line.label, **style)
        if line.error is not None:
            low, high = (
                [y + sign * e for y, e in zip(line.y, line.error, strict=True)] for sign in (-1, 1)
            )
            axes.fill_between(line.x, low, high, color=drawn.get_color(), alpha=0.2, linewidth=0)
    else:
        errors = {"xerr" if line.sideways else "yerr": line.error}
        axes.errorbar(line.x, line.y, **errors, capsize=3, label=line.label, **style)
    for x, y, note in zip(line.x, line.y, line.notes, strict=False):
        place = {"xytext": (7, -11), "textcoords": "offset points"}
        axes.annotate(note, (x, y), fontsize=8, color=line.style.get("color", "black"), **place)
