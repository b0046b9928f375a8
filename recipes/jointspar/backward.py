"""What dropped layers save of the backward pass: kernels and processor time.

    python -m recipes.jointspar.backward      # a few minutes on one core

One rank, one thread. In every round plain DDP and JointSpar at each budget take one step in turn,
so that a busy machine is busy for all; times are of the thread that runs the backward pass, without
what it waits for. "front dropped" and "back dropped" are the halves of the network by layers.
Writes ``backward.csv`` and ``backward.png``.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from recipes.errors import told_in_one_line
from recipes.jointspar.networks import deep_mlp
from recipes.models import build_model
from recipes.result_files import make_folder, pyplot, save_figure, write_csv
from torchcomp.checks import check_count
from torchcomp.jointspar import JointSpar, default_layers

BUDGETS = (0.25, 0.5, 0.75)
# By then each half of a network has been drawn alone, in a round with a clock and in one without.
LEAST_ROUNDS = 15
_KERNELS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::convolution_backward")
_HALVES = {("back",): "front dropped", ("front",): "back dropped"}


@dataclass(frozen=True)
class Problem:
    """A network and a batch for it."""

    name: str
    build: Callable[[], nn.Module]
    batch: Tensor


@dataclass
class Row:
    """What is measured of one way to drop layers.

    Attributes:
        network: its name.
        way: which layers are dropped.
        timed: of a step, the shares of layers and of bytes kept, and its milliseconds.
        kernels: of each other step, the large kernels that it ran.
    """

    network: str
    way: str
    timed: list[tuple[float, float, float]] = field(default_factory=list)
    kernels: list[int] = field(default_factory=list)

    @property
    def means(self) -> tuple[float, float, float]:
        """Mean shares of layers and of bytes kept, and mean milliseconds."""
        layers, nbytes, milliseconds = (
            statistics.mean(values) for values in zip(*self.timed, strict=True)
        )
        return layers, nbytes, milliseconds

    @property
    def mean_kernels(self) -> float:
        """Mean number of large kernels of a backward pass."""
        return statistics.mean(self.kernels)


def problems() -> list[Problem]:
    """ResNet-18 as for CIFAR, a ViT of twelve blocks, and an MLP of twenty layers."""

    def resnet() -> nn.Module:
        return build_model("torchvision/resnet18", channels=3, classes=10, small_stem=True)

    def vit() -> nn.Module:
        return build_model("timm/vit_tiny_patch16_224", channels=3, classes=10, small_stem=False)

    generator = torch.Generator().manual_seed(0)
    return [
        Problem("ResNet-18", resnet, torch.randn(8, 3, 32, 32, generator=generator)),
        Problem("ViT-tiny", vit, torch.randn(2, 3, 224, 224, generator=generator)),
        Problem(
            "MLP, 20 layers",
            lambda: deep_mlp(512, 512, 20, 10),
            torch.randn(128, 512, generator=generator),
        ),
    ]


def measure(problem: Problem, rounds: int) -> list[Row]:
    """Measure plain DDP, random sets at each budget, and halves of the network."""
    rows: dict[str, Row] = {}
    ways = list(_ways(problem))
    for place in range(rounds):
        for name, model, jointspar in ways:
            kept = jointspar.kept if jointspar is not None else ()
            way = _HALVES.get(kept, "") if name == "halves" else name
            milliseconds, kernels = _step(model, problem.batch, counted=place % 5 == 4)
            # Warm-up: memory is touched first, and JointSpar keeps everything.
            if place < 2 or not way:
                continue
            row = rows.setdefault(way, Row(problem.name, way))
            if kernels is None:
                row.timed.append((*_shares(jointspar, kept, model), milliseconds))
            else:
                row.kernels.append(kernels)
    return list(rows.values())


def _shares(
    jointspar: JointSpar | None, kept: tuple[str, ...], model: nn.Module
) -> tuple[float, float]:
    """Shares of the layers and of the bytes that a step keeps."""
    if jointspar is None:
        return 1.0, 1.0
    # DDP puts "module." before the names.
    sizes = {name.partition(".")[2]: p.nbytes for name, p in model.named_parameters()}
    nbytes = sum(sizes[name] for layer in kept for name in jointspar.layers[layer])
    return len(kept) / len(jointspar.layers), nbytes / sum(sizes.values())


def _ways(problem: Problem) -> Iterator[tuple[str, DistributedDataParallel, JointSpar | None]]:
    yield "plain DDP", DistributedDataParallel(problem.build()), None
    for budget in (1.0, *BUDGETS):
        model = DistributedDataParallel(problem.build())
        jointspar = JointSpar(model, budget=budget, rule=None, seed=1)
        yield f"budget {budget:.0%}", model, jointspar
    model = DistributedDataParallel(problem.build())
    layers = list(default_layers(model.module.named_parameters()).values())
    middle = len(layers) // 2
    halves = {
        "front": [name for names in layers[:middle] for name in names],
        "back": [name for names in layers[middle:] for name in names],
    }
    yield "halves", model, JointSpar(model, budget=0.5, rule=None, layers=halves, seed=1)


def _step(model: DistributedDataParallel, batch: Tensor, counted: bool) -> tuple[float, int | None]:
    """Milliseconds of the backward pass, or how many of the large kernels it ran."""
    model.zero_grad()
    loss = model(batch).square().mean()
    if counted:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            loss.backward()
        return 0.0, sum(event.name in _KERNELS for event in profiler.events())
    begin = time.thread_time()
    loss.backward()
    return 1000 * (time.thread_time() - begin), None


def cells_of(rows: list[Row]) -> list[list[object]]:
    """The table: means over the steps, and the share of plain DDP's time."""
    dense = {row.network: row.means[2] for row in rows if _is_dense(row)}
    cells: list[list[object]] = []
    for row in rows:
        layers, nbytes, milliseconds = row.means
        cells.append([row.network, row.way, len(row.timed), f"{layers:.3f}", f"{nbytes:.3f}"])
        cells[-1] += [f"{milliseconds:.2f}", f"{milliseconds / dense[row.network]:.3f}"]
        cells[-1].append(f"{row.mean_kernels:.1f}")
    return cells


def _is_dense(row: Row) -> bool:
    return row.way == "plain DDP"


def draw(rows: list[Row], path: Path) -> None:
    """Every measured step: its time against what it kept."""
    networks = list(dict.fromkeys(row.network for row in rows))
    figure, axes = pyplot().subplots(1, len(networks), figsize=(15, 4.6), layout="constrained")
    for each, network in zip(axes, networks, strict=True):
        held = [row for row in rows if row.network == network]
        dense = next(row for row in held if _is_dense(row)).means[2]
        for row in held:
            kept = [100 * share for share, _, _ in row.timed]
            times = [100 * time / dense for _, _, time in row.timed]
            each.plot(kept, times, ".", alpha=0.5, label=row.way)
        each.plot([0, 100], [0, 100], ":", color="black", label="in proportion")
        each.set_ylim(0, 150)
        each.set_title(f"{network}: plain DDP {dense:.0f} ms")
        each.set_xlabel("layers kept, %")
        each.grid(True, alpha=0.3)
    axes[0].set_ylabel("processor time of the backward pass, % of plain DDP's")
    axes[-1].legend(fontsize=7)
    save_figure(figure, path)


@told_in_one_line()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    folder = Path(__file__).resolve().parent / "results"
    parser.add_argument("--out", type=Path, default=folder, help="folder of the files [results]")
    parser.add_argument("--rounds", type=int, default=42, help="steps of each way [42]")
    arguments = parser.parse_args()
    check_count("--rounds", arguments.rounds, LEAST_ROUNDS)
    make_folder(arguments.out)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = [row for problem in problems() for row in measure(problem, arguments.rounds)]
    dist.destroy_process_group()
    header = ["network", "way", "steps", "layers_kept", "bytes_kept", "backward_ms"]
    header += ["share_of_plain", "kernels"]
    cells = cells_of(rows)
    for line in [header, *cells]:
        print("  ".join(f"{cell!s:>15}" for cell in line))
    write_csv(arguments.out / "backward.csv", header, cells)
    draw(rows, arguments.out / "backward.png")


if __name__ == "__main__":
    main()
