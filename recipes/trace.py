"""Record traces of a training step, which show how the exchange overlaps with the backward pass.

    python -m recipes.trace

Two ranks on this machine train a small convolutional network, with plain DDP and with
``ef(topk(0.01))``. The program writes a Chrome trace of ten steps per method and rank, for
https://ui.perfetto.dev, and prints where the time of the fastest step of rank 0 went. Other methods
are strings:

    python -m recipes.trace --methods dense 'bidirectional(topk(0.01), topk(0.01))'
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

import torchcomp
from recipes.errors import RecipeError, exit_on_user_error
from recipes.local_ranks import run_on_ranks
from recipes.result_files import make_folder
from torchcomp.spec import parse_aggregator

METHODS = ("dense", "ef(topk(0.01))")
RANKS = 2
_WARM_UP = 5  # steps before the traced ones: kernels are compiled, and DDP has rebuilt its buckets
_STEPS = 10


def main() -> None:
    """Trace every method, and print the fastest step of rank 0."""
    with exit_on_user_error():
        arguments = parse(sys.argv[1:])
        for method in set(arguments.methods) - {"dense"}:
            parse_aggregator(method)
        all_threads()
        make_folder(arguments.out)
    for number, method in enumerate(arguments.methods):
        # Without the method's arguments, which contain characters that a folder's name should not.
        folder = arguments.out / f"{number}-{method.partition('(')[0]}"
        folder.mkdir(exist_ok=True)
        path = Path(run_on_ranks(RANKS, trace, method, str(folder))[0])
        spent = ", ".join(f"{name} {ms:.1f} ms" for name, ms in spans(path).items())
        print(f"{method}: {spent}\n  {path}, for https://ui.perfetto.dev")


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


def spans(path: Path) -> dict[str, float]:
    """Return the milliseconds of the labelled blocks of the fastest step, by label.

    Blocks of other threads, and blocks inside others, count as well: the sum exceeds the step.
    """
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    # The fastest, because other programs disturb a step at random, and always slow it down.
    whole = min((e for e in events if e["name"] == "step"), key=lambda event: event["dur"])
    found: dict[str, float] = {}
    for event in events:
        # "torchcomp::encode bucket 3" or, from `step`, "backward"; in plain DDP, gloo's own labels.
        name = event["name"].partition(" bucket ")[0]
        ours = name in ("step", "forward", "backward", "optimizer")
        if 0 <= event["ts"] - whole["ts"] <= whole["dur"] and (
            ours or name.startswith(("torchcomp::", "gloo:"))
        ):
            found[name] = found.get(name, 0.0) + event["dur"] / 1000
    return found


if __name__ == "__main__":
    main()
