"""The pictures of docs/performance.md, drawn from the CSV files."""

from pathlib import Path
from typing import Any

from net.names import BF16, FLOOR, PLAIN
from report_accuracy import times_to_accuracy
from report_data import StepRows

NAMES = ("step_time.png", "bytes.png", "time_to_accuracy.png")
# Beside these two, slow links would leave nothing to see of the others: their bars are cut off.
_DENSE = (PLAIN, BF16)
_PARTS = {"compute": "#4c72b0", "encode": "#dd8452", "sockets": "#c7b299", "wait": "#c44e52"}


def draw_all(results: Path, folder: Path) -> None:
    """Draw what there are rows for."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    steps = StepRows(results / "network.csv")
    figures = (step_time(steps), traffic(steps), accuracy(results / "time_to_accuracy.csv"))
    for name, figure in zip(NAMES, figures, strict=True):
        # Without its date and version, the same data give the same file.
        figure.savefig(folder / name, dpi=110, metadata={"Software": None})


def step_time(steps: StepRows, model: str = "resnet18", hosts: int = 4) -> Any:
    """A bar for each method, split, in a panel for each link."""
    from matplotlib.figure import Figure

    rates = [mbit for mbit in steps.values(2) if (model, hosts, mbit) in steps.by_link]
    height = 0.8 + 0.4 * len(steps.methods())
    figure = Figure(figsize=(10, 1 + height * max(1, len(rates))), layout="constrained")
    panels = figure.subplots(max(1, len(rates)), squeeze=False)[:, 0]
    for axes, mbit in zip(panels, rates, strict=False):
        _step_panel(axes, steps, (model, hosts, mbit))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(_PARTS))
    return figure


def _step_panel(axes: Any, steps: StepRows, link: tuple[str, int, int]) -> None:
    methods = [m for m in steps.methods() if steps.split(*link, m) is not None][::-1]
    left = [0.0] * len(methods)
    for part, color in _PARTS.items():
        widths = [getattr(steps.split(*link, method), part) for method in methods]
        axes.barh(range(len(methods)), widths, left=left, color=color, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    ends = dict(zip(methods, left, strict=True))
    limit = 1.35 * max(
        end for method, end in ends.items() if len(ends) == 1 or method not in _DENSE
    )
    for place, (method, end) in enumerate(ends.items()):
        note = f"{steps.milliseconds(*link, method) or end:,.0f} ms"
        ratio = steps.relative(*link, method)
        note += "" if ratio is None or ratio == 1 else f" ({ratio:.3f} ×)"
        _label_bar(axes, place, end, limit, note)
    axes.set_yticks(range(len(methods)), [short(method) for method in methods], fontsize=8)
    axes.set_title(f"{link[0]}, {link[1]} hosts, {link[2]:,} Mbit/s", fontsize=10)
    axes.set(xlim=(0, limit), xlabel="milliseconds per step")


def _label_bar(axes: Any, place: int, end: float, limit: float, note: str) -> None:
    if end < limit:
        axes.text(end, place, f" {note}", va="center", fontsize=9)
    else:
        axes.text(limit, place, f"{note} → ", va="center", ha="right", fontsize=9, color="white")


def traffic(steps: StepRows) -> Any:
    """Bytes against hosts, a line a method and a panel a model, on logarithmic axes."""
    from matplotlib.figure import Figure

    models = steps.values(0)
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels = figure.subplots(1, max(1, len(models)), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=False):
        for place, method in enumerate(steps.methods()):
            _traffic_line(axes, steps, model, method, place)
        axes.set(xscale="log", yscale="log", title=model, xlabel="hosts")
        axes.set_xticks(steps.values(1), [str(hosts) for hosts in steps.values(1)], minor=False)
        axes.xaxis.set_minor_locator(_none())
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("bytes of payload that a rank sends per step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _none() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _traffic_line(axes: Any, steps: StepRows, model: str, method: str, place: int) -> None:
    if method == FLOOR:
        return
    points = [(hosts, steps.payload(model, hosts, method)) for hosts in steps.values(1)]
    known = [(hosts, sent) for hosts, sent in points if sent]
    if known:
        axes.plot(*zip(*known, strict=True), "o-", color=f"C{place}", label=short(method))


def accuracy(path: Path) -> Any:
    """Seconds to the target, a bar for each method and a panel for each link."""
    from matplotlib.figure import Figure

    found = times_to_accuracy(path)
    rates = sorted({reached.mbit for reached in found})
    figure = Figure(figsize=(10, 1 + 3.4 * max(1, len(rates))), layout="constrained")
    panels = figure.subplots(max(1, len(rates)), squeeze=False)[:, 0]
    for axes, mbit in zip(panels, rates, strict=False):
        bars = [reached for reached in found if reached.mbit == mbit][::-1]
        colors = ["#bbbbbb" if bar.missed else "#4c72b0" for bar in bars]
        axes.barh([short(bar.method) for bar in bars], [bar.seconds for bar in bars], color=colors)
        for place, bar in enumerate(bars):
            missed = f", missed in {bar.missed} of {bar.runs} runs" if bar.missed else ""
            note = f" {bar.seconds:.2f} s, {bar.steps:.0f} steps{missed}"
            axes.text(bar.seconds, place, note, va="center", fontsize=9)
        axes.set_title(f"{mbit} Mbit/s", fontsize=10)
        axes.tick_params(axis="y", labelsize=9)
        axes.set_xlim(0, 1.65 * max(bar.seconds for bar in bars))
        axes.set_xlabel("seconds of training until the target accuracy (median)")
    return figure


def short(method: str) -> str:
    """A spec without its quotes, broken in two where it is long."""
    text = method.replace('"', "")
    half = text.find("), ")
    return text if half < 0 else f"{text[: half + 2]}\n{text[half + 3 :]}"
