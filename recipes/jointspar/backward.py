"""The savings of dropped layers in the backward pass: kernels and processor time.

One rank with one thread runs plain DDP and JointSpar at each budget. Every round takes one step of
each way, so that other load on the machine affects all ways equally. Times are processor time of
the thread of the backward pass, which excludes waiting. "front dropped" and "back dropped" drop one
half of the network's layers.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from recipes.experiments import ResultTable
from recipes.jointspar.training import deep_mlp
from recipes.models import build_model
from torchcomp.jointspar import JointSpar, default_layers

# With this many rounds each half of a network has been dropped in a timed and in a counted step.
LEAST_ROUNDS, ROUNDS = 15, 42
PLAIN = "plain DDP"
_KERNELS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::convolution_backward")
_HALVES = {("back",): "front dropped", ("front",): "back dropped"}
OUTCOME = ("steps", "layers_kept", "bytes_kept", "backward_ms", "share_of_plain", "kernels")


def _model(name: str, small_stem: bool = False) -> nn.Module:
    return build_model(name, channels=3, classes=10, small_stem=small_stem)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-18": (lambda: _model("torchvision/resnet18", small_stem=True), (8, 3, 32, 32)),
    "ViT-tiny": (lambda: _model("timm/vit_tiny_patch16_224"), (2, 3, 224, 224)),
    "MLP, 20 layers": (lambda: deep_mlp(512, 512, 20, 10), (128, 512)),
}
"""How to build each network, and the shape of its batch."""
# The fastest network to measure.
QUICK_NETWORK = "MLP, 20 layers"


def open_backward(arguments: argparse.Namespace) -> Callable[[], None]:
    """Return what measures the missing networks."""
    rounds = arguments.rounds or (LEAST_ROUNDS if arguments.quick else ROUNDS)
    path, run = arguments.out / "backward.csv", ("network", "way")
    table = ResultTable(path, run, OUTCOME, f"{rounds} rounds", resume=arguments.resume)
    wanted = [QUICK_NETWORK] if arguments.quick else list(NETWORKS)

    def measure_all() -> None:
        finished = {row["network"] for row in table.rows}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for network in wanted:
            if network not in finished:
                for way, cells in measure(network, rounds):
                    table.add((network, way), cells)
        dist.destroy_process_group()

    return measure_all


def measure(network: str, rounds: int) -> Iterator[tuple[str, list[Any]]]:
    """Measure plain DDP, random sets at each budget, and halves of the network."""
    build, shape = NETWORKS[network]
    batch = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    # For each timed step, the shares of layers and bytes kept, and its milliseconds.
    timed: dict[str, list[tuple[float, float, float]]] = {}
    counted: dict[str, list[int]] = {}
    ways = list(_ways(build))
    for index in range(rounds):
        for name, model, jointspar in ways:
            kept = jointspar.kept if jointspar is not None else ()
            way = _HALVES.get(kept, "") if name == "halves" else name
            # The profiler is slow, so a step is either timed or counted.
            milliseconds, kernels = _step(model, batch, counted=index % 5 == 4)
            # Skip warm-up: memory is touched for the first time, and JointSpar keeps all layers.
            if index < 2 or not way:
                continue
            if kernels is None:
                timed.setdefault(way, []).append((*_shares(jointspar, kept, model), milliseconds))
            else:
                counted.setdefault(way, []).append(kernels)
    means = {way: [*map(statistics.mean, zip(*each, strict=True))] for way, each in timed.items()}
    for way, (layers, nbytes, milliseconds) in means.items():
        shares = (f"{layers:.3f}", f"{nbytes:.3f}", f"{milliseconds:.2f}")
        compared = f"{milliseconds / means[PLAIN][2]:.3f}"
        kernels = f"{statistics.mean(counted[way]):.1f}"
        yield way, [len(timed[way]), *shares, compared, kernels]


def _shares(
    jointspar: JointSpar | None, kept: tuple[str, ...], model: nn.Module
) -> tuple[float, float]:
    """Return the shares of the layers and of the bytes that a step keeps."""
    if jointspar is None:
        return 1.0, 1.0
    # DDP adds "module." to the names.
    sizes = {name.partition(".")[2]: p.nbytes for name, p in model.named_parameters()}
    nbytes = sum(sizes[name] for layer in kept for name in jointspar.layers[layer])
    return len(kept) / len(jointspar.layers), nbytes / sum(sizes.values())


def _ways(
    build: Callable[[], nn.Module],
) -> Iterator[tuple[str, DistributedDataParallel, JointSpar | None]]:
    yield PLAIN, DistributedDataParallel(build()), None
    for budget in (1.0, 0.25, 0.5, 0.75):
        model = DistributedDataParallel(build())
        yield f"budget {budget:.0%}", model, JointSpar(model, budget=budget, rule=None, seed=1)
    model = DistributedDataParallel(build())
    layers = list(default_layers(model.module.named_parameters()).values())
    middle = len(layers) // 2
    halves = {
        "front": [name for names in layers[:middle] for name in names],
        "back": [name for names in layers[middle:] for name in names],
    }
    yield "halves", model, JointSpar(model, budget=0.5, rule=None, layers=halves, seed=1)


def _step(model: nn.Module, batch: Tensor, counted: bool) -> tuple[float, int | None]:
    """Return the milliseconds of the backward pass, or its number of large kernels."""
    model.zero_grad()
    loss = model(batch).square().mean()
    if counted:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            loss.backward()
        return 0.0, sum(event.name in _KERNELS for event in profiler.events())
    begin = time.thread_time()
    loss.backward()
    return 1000 * (time.thread_time() - begin), None


if __name__ == "__main__":
    from recipes.jointspar.experiment import main

    main(["--only", "backward", *sys.argv[1:]])
