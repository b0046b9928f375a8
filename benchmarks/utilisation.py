"""Draw the share of a step in which the ranks compute against the bandwidth, for all methods.

    python -m benchmarks.utilisation
    python -m benchmarks.utilisation --model torchvision/vit_b_16 --step-ms 350 --out picture.png

Step times are predicted, not measured: torchcomp.advisor records each method on this machine
and computes the network from its numbers.
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from recipes.models import build_model
from torchcomp.advisor import BF16, DDP, USUAL, Link, Prediction, Run, values_of

_PICTURE = Path(__file__).parents[1] / "docs" / "performance" / "utilisation.png"
GBITS = tuple(10 ** (exponent / 8) for exponent in range(-8, 22))  # 0.1 to 400
_NAMES = {DDP: "plain DDP", BF16: "DDP's bf16 hook"}
_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")


def main() -> None:
    options = parse()
    run = Run(
        options.world_size,
        total_steps=1000,  # of local steps, for the mean over some rounds
        step_seconds=options.step_ms / 1e3,
        speedup=options.speedup,
    )
    values = values_of(build_model(options.model, channels=3, classes=1000, small_stem=False))
    lines = {
        method: curve(Prediction(method, values, run), options.ranks_per_node, options.latency_us)
        for method in options.methods
    }
    title = (
        f"{options.model.partition('/')[2]}, {options.world_size} ranks, "
        f"{options.ranks_per_node} per node,\na step of {options.step_ms:g} ms without exchange, "
        f"encoding {options.speedup:g} x as fast as one CPU core here"
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # Without matplotlib's version in the metadata, the same data give the same file.
    draw(lines, title).savefig(options.out, dpi=110, metadata={"Software": None})
    print(f"wrote {options.out}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    resnet = "torchvision/resnet50"
    add("--model", default=resnet, metavar="NAME", help=f"torchvision/... or timm/... [{resnet}]")
    add("--world-size", type=int, default=64, metavar="N", help="ranks [64]")
    add("--ranks-per-node", type=int, default=8, metavar="N", help="ranks that share a card [8]")
    add("--step-ms", type=float, default=120.0, metavar="MS", help="a step without exchange [120]")
    add("--latency-us", type=float, default=30.0, metavar="US", help="from node to node [30]")
    help_text = "how many times as fast the ranks encode as this machine; an assumption [20]"
    add("--speedup", type=float, default=20.0, metavar="N", help=help_text)
    add("--methods", nargs="+", metavar="METHOD", default=list(USUAL))
    add("--out", type=Path, default=_PICTURE, help="[docs/performance/utilisation.png]")
    return parser.parse_args()


def curve(prediction: Prediction, ranks_per_node: int, latency_us: float) -> list[float]:
    """Return the utilisation at each of :data:`GBITS`."""
    links = (Link(gbit, latency_us=latency_us, ranks_per_node=ranks_per_node) for gbit in GBITS)
    return [prediction.on(link).step.utilisation for link in links]


def draw(lines: Mapping[str, Sequence[float]], title: str) -> Any:
    """Return a figure with one line for each method, named at the side in the order of lines."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.subplots()
    colours = cycle(_COLOURS)
    # Named from the uppermost line to the lowest.
    for method in sorted(lines, key=lambda method: -sum(lines[method])):
        baseline = method in _NAMES
        axes.plot(
            GBITS,
            lines[method],
            label=_label(method),
            color="black" if baseline else next(colours),
            linestyle={DDP: "-", BF16: "--"}.get(method, "-"),
            linewidth=2.2 if baseline else 1.6,
        )
    axes.set(xscale="log", xlabel="Gbit/s of a node's network card", ylim=(0, 1.02))
    axes.set_xticks([0.1, 1, 10, 25, 100, 400], ["0.1", "1", "10", "25", "100", "400"])
    axes.set_xlim(GBITS[0], GBITS[-1])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("share of a step that computes (predicted)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    return figure


def _label(method: str) -> str:
    """The name of a method, on two lines if it is long."""
    name = _NAMES.get(method, method)
    half = name.find("), ")
    return name if half < 0 or len(name) < 30 else f"{name[: half + 2]}\n  {name[half + 3 :]}"


if __name__ == "__main__":
    main()
