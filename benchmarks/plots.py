"""The plots of docs/performance.md, drawn from the CSV files.

Titles are computed from the rows: the speed-up of torchcomp's best method among those that reached
the target accuracy, in all runs of time_to_accuracy.csv or on average at the end of those of
accuracy.csv. A method that is fast but does not reach an accuracy proves nothing.
Labels of torchcomp's methods are specs as the rows store them, so they can be pasted into a script.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from benchmarks.net.names import BASELINES, BF16, FLOOR, NAIVE_TOPK, PLAIN, POWERSGD
from benchmarks.report_accuracy import times_to_accuracy
from benchmarks.report_data import StepRows, read
from benchmarks.report_final import finals

NAMES = ("step_time.png", "bytes.png", "time_to_accuracy.png")
# On slow links these two are so long that no other bar would be visible. Their bars are cut off.
_DENSE = (PLAIN, BF16)
_PARTS = {"compute": "#4c72b0", "encode": "#dd8452", "sockets": "#c7b299", "wait": "#c44e52"}
_BASELINE_LABELS = {
    FLOOR: "no exchange (lower bound)",
    PLAIN: "plain DDP",
    BF16: "DDP's bf16 hook",
    POWERSGD: "DDP's PowerSGD hook, rank 1",
    NAIVE_TOPK: "TopK 1 % with torch.topk",
}
_LABELS = {"family": "monospace", "fontsize": 8}


def draw_all(results: Path, folder: Path) -> None:
    """Draw every plot. Without rows, a plot is empty."""
    import matplotlib

    # No display is needed to write a PNG.
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    steps, path = StepRows(read(results / "network.csv")), results / "time_to_accuracy.csv"
    trained = {result.method for result in times_to_accuracy(path) if not result.missed}
    found = finals(results / "accuracy.csv").items()
    accuracies = {method: final.accuracy.mean for method, final in found}
    targets = [100 * float(row["target"]) for row in read(path)[:1]]
    trained |= {method for method, mean in accuracies.items() if targets and mean >= targets[0]}
    figures = (step_time(steps, trained, accuracies), traffic(steps, trained), accuracy(path))
    for name, figure in zip(NAMES, figures, strict=True):
        # Without matplotlib's version in the metadata, the same data give the same file.
        figure.savefig(folder / name, dpi=110, metadata={"Software": None})


# --- Titles and labels ----------------------------------------------------------------------------


def best_of(costs: dict[str, float], trained: Collection[str]) -> str | None:
    """The method in `trained` with the lowest cost, in time or bytes. Baselines take no part."""
    candidates = [method for method in costs if method in trained and method not in BASELINES]
    return min(candidates, key=costs.get, default=None)


def finding(costs: dict[str, float], trained: Collection[str], better: str = "faster") -> str:
    """How much the best method saves: "31x faster than plain DDP with ef(topk(0.01))"."""
    best = best_of(costs, trained)
    if PLAIN not in costs or best is None:
        return "not compared with plain DDP"
    factor = costs[PLAIN] / costs[best]
    degree = f"{times(factor)} {better}" if factor > 1 else f"not {better}"
    return f"{degree} than plain DDP with\n{label(best)}"


def compared(factor: float) -> str:
    """A ratio of times in words: "31x faster" or "1.5x slower"."""
    return f"{times(factor)} faster" if factor >= 1 else f"{times(1 / factor)} slower"


def times(factor: float) -> str:
    """A factor with two or three significant digits, such as 0.42x, 3.1x and 246x."""
    digits = 0 if factor >= 10 else 1 if factor >= 1 else 2
    return f"{factor:,.{digits}f}x"


def label(method: str) -> str:
    """The spec, on two lines if it is long. It also parses with the line break."""
    half = method.find("), ")
    if method in BASELINES:
        return _BASELINE_LABELS[method]
    return method if half < 0 else f"{method[: half + 2]}\n{method[half + 3 :]}"


# --- Step time ------------------------------------------------------------------------------------


def step_time(
    steps: StepRows,
    trained: Collection[str],
    accuracies: Mapping[str, float],
    model: str = "resnet18",
    hosts: int = 4,
) -> Any:
    """One panel per link and one bar per method, divided into the parts of a step.

    Args:
        steps: the rows.
        trained: the methods that reached the target accuracy.
        accuracies: at the end of training, in per cent, by method.
        model: the model.
        hosts: number of hosts.
    """
    from matplotlib.figure import Figure

    speeds = [mbit for mbit in steps.values(2) if (model, hosts, mbit) in steps.by_link]
    height = 0.9 + 0.4 * len(steps.methods())
    figure = Figure(figsize=(10, 1 + height * max(1, len(speeds))), layout="constrained")
    panels = figure.subplots(max(1, len(speeds)), squeeze=False)[:, 0]
    for axes, mbit in zip(panels, speeds, strict=False):
        _step_panel(axes, steps, (model, hosts, mbit), trained, accuracies)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(_PARTS))
    return figure


def _step_panel(
    axes: Any,
    steps: StepRows,
    link: tuple[str, int, int],
    trained: Collection[str],
    accuracies: Mapping[str, float],
) -> None:
    methods = [m for m in steps.methods() if steps.split(*link, m) is not None][::-1]
    left = [0.0] * len(methods)
    for part, color in _PARTS.items():
        widths = [getattr(steps.split(*link, method), part) for method in methods]
        axes.barh(range(len(methods)), widths, left=left, color=color, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    ends = dict(zip(methods, left, strict=True))
    # The factor leaves space on the right for the text behind the longest bar.
    limit = 1.5 * max(end for method, end in ends.items() if len(ends) == 1 or method not in _DENSE)
    measured = {m: steps.milliseconds(*link, m) or end for m, end in ends.items()}
    for position, (method, end) in enumerate(ends.items()):
        note = f"{measured[method]:,.0f} ms"
        if method != PLAIN and PLAIN in measured:
            note += f", {compared(measured[PLAIN] / measured[method])}"
        # It can be the fastest, but is not in the title.
        if method not in {*BASELINES, *trained}:
            found = accuracies.get(method)
            known = "not measured" if found is None else f"only {found:.1f} %"
            note += f" (accuracy {known})"
        weight = "bold" if method == best_of(measured, trained) else "normal"
        _label_bar(axes, position, min(end, limit), note, weight, is_cut=end >= limit)
    axes.set_yticks(range(len(methods)), [label(method) for method in methods], **_LABELS)
    model, hosts, mbit = link
    title = f"{model}, {hosts} ranks at {mbit:,} Mbit/s: {finding(measured, trained)}"
    axes.set_title(title, fontsize=11)
    axes.set(xlim=(0, limit), xlabel="milliseconds per step")


def _label_bar(
    axes: Any, position: int, end: float, note: str, weight: str, *, is_cut: bool = False
) -> None:
    style = {"va": "center", "fontsize": 9, "weight": weight}
    if is_cut:
        # A bar that is cut off fills the panel, so its text goes inside.
        axes.text(end, position, f"{note} → ", ha="right", color="white", **style)
    else:
        axes.text(end, position, f" {note}", **style)


# --- Bytes ----------------------------------------------------------------------------------------


def traffic(steps: StepRows, trained: Collection[str]) -> Any:
    """Bytes against the number of hosts: one panel per model, one line per method."""
    from matplotlib.figure import Figure

    models = steps.values(0)
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    panels = figure.subplots(1, max(1, len(models)), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=False):
        # The index in the list of all methods gives a method the same color in every panel.
        for index, method in enumerate(steps.methods()):
            _traffic_line(axes, steps, model, method, f"C{index}")
        axes.set(xscale="log", yscale="log", xlabel="hosts, one rank each")
        axes.set_title(_traffic_title(steps, model, trained), fontsize=11)
        axes.set_xticks(steps.values(1), [str(hosts) for hosts in steps.values(1)], minor=False)
        axes.xaxis.set_minor_locator(_no_ticks())
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("payload bytes that a rank sends per step")
    lines = {n: h for p in panels for h, n in zip(*p.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=2, prop=_FONT)
    return figure


# Legends take the size under another name than tick labels do.
_FONT = {"family": "monospace", "size": 8}


def _traffic_title(steps: StepRows, model: str, trained: Collection[str]) -> str:
    hosts = max(steps.values(1))
    sent = {method: steps.payload(model, hosts, method) for method in steps.methods()}
    known = {method: value for method, value in sent.items() if value}
    return f"{model}, {hosts} ranks: {finding(known, trained, 'fewer bytes')}"


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _traffic_line(axes: Any, steps: StepRows, model: str, method: str, color: str) -> None:
    # `no-op` sends no gradients, so it has no place on a logarithmic axis.
    if method == FLOOR:
        return
    points = [(hosts, steps.payload(model, hosts, method)) for hosts in steps.values(1)]
    known = [(hosts, sent) for hosts, sent in points if sent]
    if known:
        axes.plot(*zip(*known, strict=True), "o-", color=color, label=label(method))


# --- Time to accuracy -----------------------------------------------------------------------------


def accuracy(path: Path) -> Any:
    """Seconds to the target accuracy: one panel per link, one bar per method."""
    from matplotlib.figure import Figure

    rows, found = read(path), times_to_accuracy(path)
    speeds = sorted({result.mbit for result in found})
    figure = Figure(figsize=(10, 1 + 3.8 * max(1, len(speeds))), layout="constrained")
    panels = figure.subplots(max(1, len(speeds)), squeeze=False)[:, 0]
    for axes, mbit in zip(panels, speeds, strict=False):
        bars = [result for result in found if result.mbit == mbit][::-1]
        # A method that missed the target in some run does not count as the fastest.
        reached = {bar.method: bar.seconds for bar in bars if not bar.missed}
        colors = ["#bbbbbb" if bar.missed else "#4c72b0" for bar in bars]
        axes.barh(range(len(bars)), [bar.seconds for bar in bars], color=colors)
        axes.set_yticks(range(len(bars)), [label(bar.method) for bar in bars], **_LABELS)
        for position, bar in enumerate(bars):
            missed = f", missed in {bar.missed} of {bar.runs} runs" if bar.missed else ""
            note = f"{bar.seconds:.2f} s, {bar.steps:.0f} steps{missed}"
            if bar.method != PLAIN and {bar.method, PLAIN} <= reached.keys():
                note += f", {compared(reached[PLAIN] / bar.seconds)}"
            weight = "bold" if bar.method == best_of(reached, reached) else "normal"
            _label_bar(axes, position, bar.seconds, note, weight)
        hosts, target = rows[0]["hosts"], 100 * float(rows[0]["target"])
        best = finding(reached, reached)
        title = f"{hosts} ranks at {mbit:,} Mbit/s: {target:g} % accuracy {best}"
        axes.set_title(title, fontsize=11)
        axes.set_xlim(0, 1.65 * max(bar.seconds for bar in bars))
        axes.set_xlabel("seconds of training until the target accuracy (median)")
    return figure
