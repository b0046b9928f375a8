"""Record traces of a training step, and draw how the exchange overlaps with the backward pass.

    python -m recipes.trace

Two ranks on this machine train a small convolutional network, with plain DDP and with
``ef(topk(0.01))``. The program writes a Chrome trace of ten steps per method and rank, for
https://ui.perfetto.dev, and draws the fastest step of rank 0 in ``runs/trace/overlap.png``.
Other methods are strings:

    python -m recipes.trace --methods dense 'bidirectional(topk(0.01), topk(0.01))'
"""

import argparse
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

import torchcomp
from recipes.errors import RecipeError, exit_on_user_error
from recipes.local_ranks import run_on_ranks
from recipes.result_files import make_folder, pyplot, save_figure
from torchcomp.spec import parse_aggregator

METHODS = ("dense", "ef(topk(0.01))")
RANKS = 2
_WARM_UP = 5  # steps before the traced ones: kernels are compiled, and DDP has rebuilt its buckets
_STEPS = 10
_COLOURS = {
    "forward": "#c9d3e3",
    "backward": "#8fa8cf",
    "optimizer": "#e3dac9",
    "wait": "#c44e52",
    "encode": "#dd8452",
    "all_reduce": "#55a868",
    "all_gather": "#55a868",
    "all_to_all": "#55a868",
    "decode": "#8172b3",
    "finish": "#ccb974",
    "average": "#dddddd",
}
# What the legend says instead of the label. Labels of one colour are one entry.
_MEANINGS = {
    **dict.fromkeys(("all_reduce", "all_gather", "all_to_all"), "collective"),
    "average": "other work on the bucket",
    "finish": "finish: commit or roll back",
    "wait": "wait for the exchange, after the last gradient",
}


@dataclass(frozen=True)
class Span:
    """A labelled block of a trace, in milliseconds since the start of the step."""

    name: str
    bucket: int | None
    is_main: bool  # whether it ran in the main thread
    start: float
    length: float


def main() -> None:
    """Trace every method, and draw the steps of rank 0."""
    with exit_on_user_error():
        arguments = parse(sys.argv[1:])
        for method in set(arguments.methods) - {"dense"}:
            parse_aggregator(method)
        all_threads()
        make_folder(arguments.out)
    paths = {}
    for number, method in enumerate(arguments.methods):
        # Without the method's arguments, which contain characters that a folder's name should not.
        folder = arguments.out / f"{number}-{method.partition('(')[0]}"
        folder.mkdir(exist_ok=True)
        paths[method] = run_on_ranks(RANKS, trace, method, str(folder))[0]
    picture = arguments.out / "overlap.png"
    draw({method: read(Path(path)) for method, path in paths.items()}, picture)
    print(f"traces: {arguments.out}/*/rank*.json, for https://ui.perfetto.dev")
    print(f"picture: {picture}")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--methods", nargs="+", default=METHODS, help='"dense" for plain DDP, and spec strings'
    )
    parser.add_argument("--out", type=Path, default=Path("runs/trace"), help="folder [runs/trace]")
    return parser.parse_args(arguments)


def all_threads() -> _ExperimentalConfig:
    """Return the profiler's option to record all threads, among them torchcomp's."""
    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        raise RecipeError(
            f"torch {torch.__version__} cannot trace all threads of a process, and torchcomp's "
            "exchange has its own; use a later torch"
        ) from None


# --- On every rank --------------------------------------------------------------------------------


def trace(method: str, folder: str) -> str:
    """Train, write the Chrome trace of the last steps, and return its path."""
    torch.manual_seed(0)
    # Small buckets, so that a small model has several.
    model = DistributedDataParallel(network(), bucket_cap_mb=1)
    handle = None if method == "dense" else torchcomp.register(model, method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    for _ in range(_WARM_UP):
        step(model, optimizer, images, labels)
    traced = profile(activities=[ProfilerActivity.CPU], experimental_config=all_threads())
    with traced:
        for _ in range(_STEPS):
            with record_function("step"):
                step(model, optimizer, images, labels)
    path = f"{folder}/rank{torch.distributed.get_rank()}.json"
    traced.export_chrome_trace(path)
    if handle is not None:
        handle.close()
    return path


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> None:
    """Take one training step."""
    with record_function("forward"):
        loss = nn.functional.cross_entropy(model(images), labels)
    with record_function("backward"):
        loss.backward()
    with record_function("optimizer"):
        optimizer.step()
        optimizer.zero_grad()


def network() -> nn.Module:
    """Return a network whose first layers compute most and whose last layers have most weights."""
    # The backward pass runs from the last layers to the first: large buckets are ready early.
    conv = partial(nn.Conv2d, kernel_size=3, padding=1)
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128), (128, 256), (256, 512)):
        layers += [conv(before, after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


# --- The picture ----------------------------------------------------------------------------------


def read(path: Path) -> list[Span]:
    """Return the labelled blocks of the fastest step, outer blocks before those inside them."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    # The fastest, because other programs disturb a step at random, and always slow it down.
    whole = min((e for e in events if e["name"] == "step"), key=lambda event: event["dur"])
    events = [e for e in events if 0 <= e["ts"] - whole["ts"] <= whole["dur"]]
    # In plain DDP, only gloo's own labels show the all-reduce.
    other = "torchcomp::" if any("torchcomp::" in e["name"] for e in events) else "gloo:"
    spans = []
    for event in events:
        # "torchcomp::encode bucket 3" or, from `step`, "backward"
        name, _, bucket = event["name"].removeprefix(other).partition(" bucket ")
        name = name.removesuffix(" downlink")
        if name in _COLOURS:
            number = int(bucket) if bucket else None
            start, length = (event["ts"] - whole["ts"]) / 1000, event["dur"] / 1000
            spans.append(Span(name, number, event["tid"] == whole["tid"], start, length))
    return sorted(spans, key=lambda span: -span.length)


def draw(traces: dict[str, list[Span]], path: Path) -> None:
    """Draw one panel per method, with a row for the main thread and one for the exchange."""
    size = (11, 1.6 + 2.1 * len(traces))
    figure, panels = pyplot().subplots(
        len(traces), figsize=size, layout="constrained", sharex=True, squeeze=False
    )
    for axes, (method, spans) in zip(panels[:, 0], traces.items(), strict=True):
        _draw_step(axes, method, spans)
    panels[-1, 0].set_xlabel("milliseconds since the start of the step")
    legend = {h.get_label(): h for axes in panels[:, 0] for h in axes.containers}
    names = [_MEANINGS.get(name, name) for name in _COLOURS]
    known = [name for name in dict.fromkeys(names) if name in legend]
    figure.legend([legend[name] for name in known], known, loc="outside lower center", ncols=4)
    figure.suptitle(f"The exchange runs beside the backward pass (the fastest of {_STEPS} steps)")
    save_figure(figure, path)


def _draw_step(axes: Any, method: str, spans: list[Span]) -> None:
    for span in spans:
        row = 1 if span.is_main else 0
        meaning = _MEANINGS.get(span.name, span.name)
        # Blocks inside others are drawn later, and smaller, so that both can be seen.
        is_outer = (span.bucket is None and span.name != "wait") or span.name == "average"
        height = 0.7 if is_outer else 0.5
        axes.barh(row, span.length, height, span.start, color=_COLOURS[span.name], label=meaning)
        if span.name == "average" and span.bucket is not None:
            middle = span.start + span.length / 2
            # The word only once: short buckets have no space for it.
            text = str(span.bucket) if span.bucket else "bucket 0"
            axes.text(middle, 0.42, text, ha="center", va="bottom", fontsize=8)
    ends = {span.name: span.start + span.length for span in spans}
    # Plain DDP has no label for the time in which it waits.
    waits = [span.length for span in spans if span.name == "wait"]
    note = f", waits {sum(waits):.0f} ms after the last gradient" if waits else ""
    axes.set_title(f"{method}: {ends['optimizer']:.0f} ms{note}", fontsize=11, loc="left")
    axes.set_yticks([1, 0], ["main thread", "exchange"])
    axes.set_ylim(-0.5, 1.5)
    axes.grid(axis="x", alpha=0.3)


if __name__ == "__main__":
    main()
