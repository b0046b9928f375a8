"""The pictures of docs/performance.md and docs/prediction.md, drawn from the CSV files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.figures import Steps
from benchmarks.net.names import BF16, FLOOR, PLAIN
from benchmarks.tables import label

# On slow links, the bars of these two are so long that no other would be visible: they are cut.
_DENSE = (PLAIN, BF16)
_PARTS = {"compute": "#4c72b0", "encode": "#dd8452", "sockets": "#c7b299", "wait": "#c44e52"}
_FONT = {"family": "monospace", "size": 8}


def draw_all(results: Path, folder: Path) -> None:
    """Draw every picture."""
    import matplotlib

    # No display is needed to write a PNG.
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        # Without matplotlib's version in the metadata, the same data give the same file.
        draw(results).savefig(folder / name, dpi=110, metadata={"Software": None})


def step_time(results: Path) -> Any:
    """One panel for each speed and one bar for each method, divided into the parts of a step."""
    steps, model, hosts = Steps(results / "network.csv"), "resnet18", 4
    panels = _panels(len(steps.speeds), 0.9 + 0.4 * len(steps.methods))
    for axes, mbit in zip(panels, steps.speeds, strict=True):
        link = model, hosts, mbit
        splits = {method: steps.split(link, method) for method in reversed(steps.methods)}
        known = {method: split for method, split in splits.items() if split is not None}
        ends = [0.0] * len(known)
        for part, color in _PARTS.items():
            widths = [getattr(split, part) for split in known.values()]
            axes.barh(range(len(known)), widths, left=ends, color=color, label=part)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        longest = max(end for method, end in zip(known, ends, strict=True) if method not in _DENSE)
        axes.set_xlim(0, 1.5 * longest)
        notes = []
        for method in known:
            time, relative = steps.milliseconds(link, method), steps.relative(link, method)
            notes.append(f"{time:,.0f} ms" + (f", {relative:.3f} x" if relative else ""))
        _note(axes, list(known), ends, notes)
        axes.set_title(f"{model}, {hosts} hosts, {mbit:,} Mbit/s: milliseconds per step")
    handles, names = panels[0].get_legend_handles_labels()
    panels[0].figure.legend(handles, names, loc="outside upper center", ncols=len(_PARTS))
    return panels[0].figure


def time_to_accuracy(results: Path) -> Any:
    """One panel for each speed and one bar for each method."""
    found = figures.times_to_accuracy(results / "time_to_accuracy.csv")
    speeds = sorted({each.mbit for each in found})
    panels = _panels(len(speeds), 3.8)
    for axes, mbit in zip(panels, speeds, strict=True):
        bars = [each for each in found if each.mbit == mbit][::-1]
        seconds = [bar.seconds for bar in bars]
        axes.barh(
            range(len(bars)),
            seconds,
            color=["#bbbbbb" if bar.missed else "#4c72b0" for bar in bars],
        )
        axes.set_xlim(0, 1.4 * max(seconds))
        missed = [f", missed by {bar.missed} of 3 seeds" if bar.missed else "" for bar in bars]
        notes = [f"{bar.seconds:.1f} s{text}" for bar, text in zip(bars, missed, strict=True)]
        _note(axes, [bar.method for bar in bars], seconds, notes)
        axes.set_title(f"4 hosts, {mbit:,} Mbit/s: seconds of training to 99 % accuracy")
    return panels[0].figure


def nbytes(results: Path) -> Any:
    """Bytes against the number of hosts: one panel for each model, one line for each method."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    steps = Steps(results / "network.csv")
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    panels = figure.subplots(1, len(steps.models), squeeze=False)[0]
    for axes, model in zip(panels, steps.models, strict=True):
        # The index in the list of all methods gives a method the same color in every panel.
        for index, method in enumerate(steps.methods):
            sent = [(n, steps.nbytes("payload_bytes", model, n, method)) for n in steps.hosts]
            known = [point for point in sent if point[1]]
            if known and method != FLOOR:  # which sends nothing: no place on a logarithmic axis
                axes.plot(*zip(*known, strict=True), "o-", color=f"C{index}", label=_plain(method))
        axes.set(xscale="log", yscale="log", xlabel="hosts, one rank each", title=model)
        axes.set_xticks(steps.hosts, map(str, steps.hosts), minor=False)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("payload bytes that a rank sends per step")
    lines = {n: h for p in panels for h, n in zip(*p.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=2, prop=_FONT)
    return figure


def prediction(results: Path) -> Any:
    """Predicted against measured step times: a point for each set-up."""
    from matplotlib.figure import Figure

    rows = figures.predictions(results / "predict.csv")
    times = [figures.measured(row) for row in rows]
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    axes = figure.subplots()
    for estimate, name, color in (
        (figures.computed, "from the numbers of the link alone", "#c7b299"),
        (figures.predicted, "from measured collectives", "#4c72b0"),
    ):
        axes.scatter(times, [estimate(row) for row in rows], s=8, color=color, label=name)
    ends = min(times), max(times)
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms per step", ylabel="predicted, ms")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _panels(count: int, height: float) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1 + height * count), layout="constrained")
    return figure.subplots(count, squeeze=False)[:, 0]


def _note(axes: Any, methods: list[str], ends: list[float], notes: list[str]) -> None:
    """Name the bars of a panel, and write a note at the end of each."""
    limit = axes.get_xlim()[1]
    for position, (end, note) in enumerate(zip(ends, notes, strict=True)):
        cut = end >= limit  # then the text goes inside
        place = {"ha": "right", "color": "white"} if cut else {"ha": "left", "color": "black"}
        text = f"{note} → " if cut else f" {note}"
        axes.text(min(end, limit), position, text, va="center", fontsize=9, **place)
    axes.set_yticks(range(len(methods)), [_plain(each) for each in methods], font=_FONT)


def _plain(method: str) -> str:
    """The name of a method, on two lines if it is long."""
    return label(method).replace("`", "").replace("), ", "),\n", 1)


PICTURES: dict[str, Callable[[Path], Any]] = {
    "step_time.png": step_time,
    "bytes.png": nbytes,
    "time_to_accuracy.png": time_to_accuracy,
    "prediction.png": prediction,
}
