"""Convergence of the paper's algorithm and of ours, with linear scaling, SGD and LARS.

The batch of a simulated worker is fixed, so the whole batch and the learning rate grow with their
number. Held-out images and seeds that are not reported choose the learning rate of each method.
Every method is then trained with its own learning rate and with that of dense training.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from recipes.experiments import ResultTable, fill, tuning_seeds
from recipes.image_data.in_memory import evaluate
from recipes.image_data.order import TrainOrder
from recipes.jointspar.large_batch import digits
from recipes.jointspar.methods import Dense, LayerSampling, parse_method
from recipes.jointspar.simulation import SimulatedRanks
from recipes.jointspar.training import Batches, ResidualMLP, Schedule, build_optimizer
from recipes.rows import Row, best, columns, grouped, typed
from torchcomp.jointspar import Literal

OPTIMIZERS = ("sgd", "lars")
BATCH = 25
"""Images of one worker per step."""
WORKERS, QUICK_WORKERS = (2, 4, 8), (4,)
# For each optimizer, the peak learning rates of one worker that every method tries.
LRS = {"sgd": (0.003125, 0.00625, 0.0125, 0.025, 0.05), "lars": (0.025, 0.05, 0.1, 0.2)}
QUICK_LRS = {"sgd": (0.0125,), "lars": (0.1,)}
QUANTITIES = ("train_loss", "test_accuracy")
OUTCOME = (
    *("train_loss", "validation", "test", "computed", "sent"),
    *("lowest_p", "highest_p", "largest_norm"),
)
# L is the largest norm seen so far, 1 to 13 here. In units of p_min^3 / L^2, for which the exponent
# of a kept layer at p_min is about 1, this alpha is then 0.005 to 0.9.
_PAPERS_RULE = Literal(1e-8)
DENSE = str(Dense())
PAPER = str(LayerSampling(0.6, selection="per-rank", rule=_PAPERS_RULE))
OURS = str(LayerSampling(0.6, "bytes"))
METHODS = (
    *(DENSE, PAPER, OURS),
    str(LayerSampling(0.6, rule=_PAPERS_RULE)),
    str(LayerSampling(0.6, rule=None)),
    str(LayerSampling(0.3, selection="per-rank", rule=_PAPERS_RULE)),
    str(LayerSampling(0.3, "bytes")),
)


@dataclass(frozen=True)
class Run:
    """The settings of a run. Its lr is that of one worker, multiplied by their number."""

    optimizer: str
    workers: int
    method: str
    lr: float
    seed: int


def open_convergence(arguments: argparse.Namespace) -> Callable[[], None]:
    """Return what tunes every method and optimizer, and trains the reported runs."""
    quick = arguments.quick
    workers, epochs, lrs = (QUICK_WORKERS, 3, QUICK_LRS) if quick else (WORKERS, 30, LRS)
    task = f"digits, residual MLP of 10 layers, {epochs} epochs, {BATCH} images per worker"
    tuning, table = (
        ResultTable(
            arguments.out / f"{name}.csv",
            *(columns(Run), OUTCOME, task),
            resume=arguments.resume,
            curve=curve,
        )
        for name, curve in (
            ("convergence_tuning", ()),
            ("convergence", ("quantity", *map(str, range(1, epochs + 1)))),
        )
    )
    cases = list(itertools.product(OPTIMIZERS, workers, METHODS))
    planned = [
        Run(*case, lr, seed)
        for seed in tuning_seeds(arguments.seeds, 2)
        for case in cases
        for lr in lrs[case[0]]
    ]

    def measure() -> None:
        fill(tuning, planned, partial(_outcome, epochs=epochs), arguments.processes)
        # A resumed table can have a tuning seed that is reported now.
        seeds = {run.seed for run in planned}
        chosen = chosen_lrs([row for row in typed(tuning.rows) if row["seed"] in seeds])
        reported = [
            Run(*case, lr, seed)
            for seed in arguments.seeds
            for case in cases
            for lr in dict.fromkeys([chosen[case[0], case[2]], chosen[case[0], DENSE]])
        ]
        fill(table, reported, partial(simulate, epochs=epochs), arguments.processes)

    return measure


def chosen_lrs(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Return the learning rate of one worker for each optimizer and method."""
    groups = grouped(rows, "optimizer", "method")
    return {key: best(group, "lr", "validation") for key, group in groups.items()}


def steps_per_epoch(workers: int) -> int:
    return len(digits()[0].labels) // (BATCH * workers)


def simulate(run: Run, epochs: int) -> tuple[list[str], list[list[str]]]:
    """Train with simulated ranks; return the run's cells and curves, NaN if it diverged."""
    images, method = digits(), parse_method(run.method)
    count, batch = len(images[0].labels), BATCH * run.workers
    ranks = [
        Batches(images[0], TrainOrder(count, batch, rank, run.workers, run.seed))
        for rank in range(run.workers)
    ]
    per_epoch = ranks[0].order.steps_per_epoch
    torch.manual_seed(run.seed)
    module = ResidualMLP(64, 10, (16, 64, 32, 128))
    simulated = SimulatedRanks(module, method, run.workers, run.seed)
    schedule = Schedule.of_paper(epochs * per_epoch, run.lr * run.workers)
    sampled = simulated if simulated.samplers else None
    optimizer = build_optimizer(module, optimizer_for(run), schedule.lr, sampled)
    losses, tests = [], []
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr_at(step)
        batches = [each.batch(step) for each in ranks]
        if not simulated.backward([partial(_loss, module, *each) for each in batches]):
            nans = [[name, *["nan"] * epochs] for name in QUANTITIES]
            return ["nan"] * len(OUTCOME), nans
        optimizer.step()
        if (step + 1) % per_epoch == 0:
            losses.append(_loss(module, images[0].images, images[0].labels).item())
            tests.append(evaluate(module, images[2])[0])
    cells = [
        *(f"{losses[-1]:.5g}", f"{evaluate(module, images[1])[0]:.3f}", f"{tests[-1]:.3f}"),
        *(f"{simulated.computed:.4f}", f"{simulated.sent:.4f}"),
        *(f"{p:.4f}" for p in simulated.extremes),
        f"{simulated.largest:.4g}",
    ]
    curves = [[f"{loss:.4g}" for loss in losses], [f"{test:.2f}" for test in tests]]
    return cells, [[name, *curve] for name, curve in zip(QUANTITIES, curves, strict=True)]


def _outcome(run: Run, epochs: int) -> list[str]:
    return simulate(run, epochs)[0]


def _loss(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(module(images), labels)


def optimizer_for(run: Run) -> str:
    """Return the optimizer: ranks with separate sets know no common p, and train with lars-own."""
    method = parse_method(run.method)
    per_rank = isinstance(method, LayerSampling) and not method.shared
    return "lars-own" if per_rank and run.optimizer == "lars" else run.optimizer
