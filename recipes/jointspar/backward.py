"""The savings of dropped layers in the backward pass: kernels and processor time.

    python -m recipes.jointspar.backward

Takes a few minutes on one core. One rank with one thread runs plain DDP and JointSpar at each
budget. Every round takes one step of each way, so that other load on the machine affects
all ways equally. Times are processor time of the thread of the backward pass, which excludes
waiting. "front dropped" and "back dropped" drop one half of the network's layers. Writes
``backward.csv`` and ``backward.png``.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from recipes.errors import exit_on_user_error
from recipes.experiments import ResultTable
from recipes.jointspar.networks import deep_mlp
from recipes.jointspar.parts import part_parser
from recipes.models import build_model
from recipes.result_files import make_folder, pyplot, read_csv, save_figure
from torchcomp.checks import check_count
from torchcomp.jointspar import JointSpar, default_layers

BUDGETS = (0.25, 0.5, 0.75)
# With this many rounds each half of a network has been dropped in a timed and in a counted step.
LEAST_ROUNDS = 15
ROUNDS = 42
# The fastest network to measure.
QUICK_NETWORKS = ("MLP, 20 layers",)
COLUMNS = (
    *("network", "way", "steps", "layers_kept", "bytes_kept", "backward_ms"),
    *("share_of_plain", "kernels"),
)
_KERNELS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::convolution_backward")
_PLAIN = "plain DDP"
_HALVES = {("back",): "front dropped", ("front",): "back dropped"}


@dataclass(frozen=True)
class NetworkCase:
    """A network and a batch for it."""

    name: str
    build: Callable[[], nn.Module]
    batch: Tensor


@dataclass
class Row:
    """The measurements of one way to drop layers.

    Attributes:
        network: name of the network.
        way: which layers are dropped.
        timed: for each timed step, the shares of layers and bytes kept, and its milliseconds.
        kernels: for each counted step, the number of large kernels.
    """

    network: str
    way: str
    timed: list[tuple[float, float, float]] = field(default_factory=list)
    kernels: list[int] = field(default_factory=list)

    @property
    def means(self) -> tuple[float, float, float]:
        """Mean shares of layers and bytes kept, and mean milliseconds."""
        layers, nbytes, milliseconds = (
            statistics.mean(values) for values in zip(*self.timed, strict=True)
        )
        return layers, nbytes, milliseconds

    @property
    def mean_kernels(self) -> float:
        """Mean number of large kernels of a backward pass."""
        return statistics.mean(self.kernels)


def cases() -> list[NetworkCase]:
    """Return ResNet-18 for CIFAR, a ViT of twelve blocks, and an MLP of twenty layers."""

    def resnet() -> nn.Module:
        return build_model("torchvision/resnet18", channels=3, classes=10, small_stem=True)

    def vit() -> nn.Module:
        return build_model("timm/vit_tiny_patch16_224", channels=3, classes=10, small_stem=False)

    generator = torch.Generator().manual_seed(0)
    return [
        NetworkCase("ResNet-18", resnet, torch.randn(8, 3, 32, 32, generator=generator)),
        NetworkCase("ViT-tiny", vit, torch.randn(2, 3, 224, 224, generator=generator)),
        NetworkCase(
            "MLP, 20 layers",
            lambda: deep_mlp(512, 512, 20, 10),
            torch.randn(128, 512, generator=generator),
        ),
    ]


def measure(case: NetworkCase, rounds: int) -> list[Row]:
    """Measure plain DDP, random sets at each budget, and halves of the network."""
    rows: dict[str, Row] = {}
    ways = list(_ways(case))
    for index in range(rounds):
        for name, model, jointspar in ways:
            kept = jointspar.kept if jointspar is not None else ()
            way = _HALVES.get(kept, "") if name == "halves" else name
            milliseconds, kernels = _step(model, case.batch, counted=index % 5 == 4)
            # Skip warm-up: memory is touched for the first time, and JointSpar keeps all layers.
            if index < 2 or not way:
                continue
            row = rows.setdefault(way, Row(case.name, way))
            if kernels is None:
                row.timed.append((*_shares(jointspar, kept, model), milliseconds))
            else:
                row.kernels.append(kernels)
    return list(rows.values())


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


def _ways(case: NetworkCase) -> Iterator[tuple[str, DistributedDataParallel, JointSpar | None]]:
    yield _PLAIN, DistributedDataParallel(case.build()), None
    for budget in (1.0, *BUDGETS):
        model = DistributedDataParallel(case.build())
        jointspar = JointSpar(model, budget=budget, rule=None, seed=1)
        yield f"budget {budget:.0%}", model, jointspar
    model = DistributedDataParallel(case.build())
    layers = list(default_layers(model.module.named_parameters()).values())
    middle = len(layers) // 2
    halves = {
        "front": [name for names in layers[:middle] for name in names],
        "back": [name for names in layers[middle:] for name in names],
    }
    yield "halves", model, JointSpar(model, budget=0.5, rule=None, layers=halves, seed=1)


def _step(model: DistributedDataParallel, batch: Tensor, counted: bool) -> tuple[float, int | None]:
    """Return the milliseconds of the backward pass, or its number of large kernels."""
    model.zero_grad()
    loss = model(batch).square().mean()
    # The profiler is slow, so a step is either timed or counted.
    if counted:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            loss.backward()
        return 0.0, sum(event.name in _KERNELS for event in profiler.events())
    begin = time.thread_time()
    loss.backward()
    return 1000 * (time.thread_time() - begin), None


def cells_of(rows: list[Row]) -> list[list[object]]:
    """Return the rows of the table: means over the steps, and the share of plain DDP's time."""
    dense = {row.network: row.means[2] for row in rows if row.way == _PLAIN}
    cells: list[list[object]] = []
    for row in rows:
        layers, nbytes, milliseconds = row.means
        cells.append([row.network, row.way, len(row.timed), f"{layers:.3f}", f"{nbytes:.3f}"])
        cells[-1] += [f"{milliseconds:.2f}", f"{milliseconds / dense[row.network]:.3f}"]
        cells[-1].append(f"{row.mean_kernels:.1f}")
    return cells


def draw(table: Path, path: Path) -> None:
    """Draw the mean time of each way against the layers that it keeps."""
    rows = read_csv(table)
    networks = list(dict.fromkeys(row["network"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    figure, axes = pyplot().subplots(
        1, len(networks), figsize=(5 * len(networks), 5), layout="constrained", squeeze=False
    )
    for each, network in zip(axes[0], networks, strict=True):
        of_network = [row for row in rows if row["network"] == network]
        for row in of_network:
            style = {"color": f"C{ways.index(row['way'])}", "label": row["way"]}
            # Hollow, because "budget 100%" would hide plain DDP behind it.
            hollow = {"markerfacecolor": "none", "markersize": 11} if _is_plain(row) else {}
            kept, time = (100 * float(row[name]) for name in ("layers_kept", "share_of_plain"))
            each.plot(kept, time, "o", **style, **hollow)
        each.plot([0, 100], [0, 100], ":", color="black", label="in proportion")
        plain = next(row for row in of_network if _is_plain(row))
        each.set_ylim(0, 115)
        each.set_title(f"{network}: plain DDP {float(plain['backward_ms']):.0f} ms", fontsize=10)
        each.set_xlabel("layers kept, % (mean)")
        each.grid(True, alpha=0.3)
    axes[0][0].set_ylabel("backward pass, % of plain DDP's processor time")
    figure.suptitle(_title(rows), fontsize=11)
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, fontsize=8)
    save_figure(figure, path)


def _title(rows: list[dict[str, str]]) -> str:
    shares = [
        f"{float(row['share_of_plain']):.0%} ({row['network']})"
        for row in rows
        if row["way"] == "budget 50%"
    ]
    return (
        f"JointSpar with a budget of 50%: the backward pass takes {', '.join(shares)} of plain "
        "DDP's time"
    )


def _is_plain(row: dict[str, str]) -> bool:
    return row["way"] == _PLAIN


@exit_on_user_error()
def main() -> None:
    """Measure the missing networks, print the table, and draw the picture."""
    arguments = parse(sys.argv[1:])
    table = open_table(arguments)
    make_folder(arguments.out)
    finished = {row["network"] for row in table.rows}
    wanted = [case for case in cases() if case.name not in finished]
    if arguments.quick:
        wanted = [case for case in wanted if case.name in QUICK_NETWORKS]
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for case in wanted:
        table.add(*cells_of(measure(case, arguments.rounds)))
    dist.destroy_process_group()
    for line in [COLUMNS, *(row.values() for row in table.rows)]:
        print("  ".join(f"{cell!s:>15}" for cell in line))
    draw(table.path, arguments.out / "backward.png")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = part_parser(__doc__)
    parser.add_argument(
        "--rounds", type=int, help=f"steps of each way [{ROUNDS}; with --quick: {LEAST_ROUNDS}]"
    )
    parsed = parser.read(words)
    if parsed.rounds is None:
        parsed.rounds = LEAST_ROUNDS if parsed.quick else ROUNDS
    check_count("--rounds", parsed.rounds, LEAST_ROUNDS)
    parsed.out = parser.output_folder(parsed, published=parsed.rounds == ROUNDS)
    return parsed


def open_table(arguments: argparse.Namespace) -> ResultTable:
    """Open the table, with the finished networks if the experiment is resumed."""
    task = f"{arguments.rounds} rounds"
    return ResultTable(arguments.out / "backward.csv", COLUMNS, task, resume=arguments.resume)


if __name__ == "__main__":
    main()
