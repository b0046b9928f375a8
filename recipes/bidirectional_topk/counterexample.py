"""Three quadratics on which compressing both ways ends lower than compressing one way.

This is the counterexample of Zou's thesis (2022). Rank q has F_q(w) = 1/2 |w - a_q 1|^2 with
a = 1, 5, 10 in 100 dimensions, and each step keeps one entry. Three processes train it in float64
over gloo, through DDP and ``torchcomp.register``.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, pvariance

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from recipes.experiments import ResultTable
from recipes.local_ranks import run_on_ranks
from recipes.result_files import provenance, write_csv
from recipes.rows import Row, typed, where

CENTRES = (1.0, 5.0, 10.0)
DIMENSIONS = 100
START = 20.0
LR = 0.01
STEPS = 1000
MOMENTS = (300, 500)
TAIL_FROM = 400
# At the mean of the centres the three gradients cancel. F* is d times half their variance.
MINIMUM = DIMENSIONS * pvariance(CENTRES) / 2

METHODS = {
    "unidirectional": "ef(topk(k=1))",
    "bidirectional": 'bidirectional(topk(k=1), topk(k=1), selection="exact")',
    "downlink only": 'bidirectional(identity, topk(k=1), selection="exact")',
}
# As printed in the thesis: F at t = 300 and 500, and the mean of F over t in [400, 1000).
PUBLISHED = {
    "unidirectional": ("698.906", "697.687", "701.309"),
    "bidirectional": ("695.227", "693.113", "692.174"),
    "downlink only": ("677.778", "677.778", "677.778"),
}
LRS = (0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.03)
SCANNED = ("unidirectional", "bidirectional")
# Small learning rates take longer to descend, so the scan compares only the last steps.
LATE_FROM = 800

LATE_GAP = f"mean_F_minus_least_from_{LATE_FROM}"
_PRINTED = (*(f"F_at_{t}" for t in MOMENTS), f"mean_F_from_{TAIL_FROM}")
Job = tuple[float, str]
"""Learning rate and method of a run."""


def open_counterexample(arguments: argparse.Namespace) -> Callable[[], list[str]]:
    """Return what trains on three processes what the table lacks, and compares with the thesis."""
    task = f"{len(CENTRES)} ranks, d = {DIMENSIONS}, {STEPS} steps"
    path, curves = arguments.out / "counterexample.csv", "counterexample_curves.csv"
    table = ResultTable(
        path, ("lr", "method"), (*_PRINTED, LATE_GAP), task, resume=arguments.resume
    )
    lrs = (LRS[0], LR) if arguments.quick else LRS
    jobs = [(lr, each) for lr in lrs for each in (METHODS if lr == LR else SCANNED)]

    def measure() -> list[str]:
        missing = table.missing(jobs)
        found = run_on_ranks(len(CENTRES), on_this_rank, missing)[0] if missing else []
        for job, values in zip(missing, found, strict=True):
            table.add(job, outcome(values))
        drawn = [values for (lr, _), values in zip(missing, found, strict=True) if lr == LR]
        # The picture needs the curves of all methods at the thesis's learning rate.
        if len(drawn) == len(METHODS):
            _write_curves(drawn, arguments.out / curves)
        problems = differences(typed(table.rows))
        if not problems:
            print("every number is the thesis's, to its last printed digit\n", flush=True)
        return problems

    return measure


class Quadratic(nn.Module):
    """F_q of one rank, as a function of the vector w that all ranks train."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((DIMENSIONS,), START, dtype=torch.float64))

    def forward(self, centre: float) -> Tensor:
        return distance(self.w, centre)


def distance(w: Tensor, centre: float) -> Tensor:
    """Return F_q(w) = 1/2 |w - a_q 1|^2."""
    return (w - centre).square().sum() / 2


def on_this_rank(jobs: Sequence[Job], steps: int = STEPS) -> list[list[float]]:
    """Train every job as one rank of the default group, and return F before every step."""
    return [train(METHODS[method], lr, steps) for lr, method in jobs]


def train(spec: str, lr: float, steps: int) -> list[float]:
    """Take ``steps`` steps as this rank, and return F before each."""
    centre = CENTRES[dist.get_rank()]
    model = DistributedDataParallel(Quadratic())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    values = []
    with torchcomp.register(model, spec):
        for _ in range(steps):
            w = model.module.w.detach()
            values.append(fmean(float(distance(w, a)) for a in CENTRES))
            optimizer.zero_grad()
            model(centre).backward()
            optimizer.step()
    return values


def outcome(values: Sequence[float]) -> list[str]:
    """Return the cells of a run, from F before every step."""
    printed = [*(values[t] for t in MOMENTS), fmean(values[TAIL_FROM:])]
    return [f"{number:.6f}" for number in (*printed, fmean(values[LATE_FROM:]) - MINIMUM)]


def _write_curves(runs: Sequence[Sequence[float]], path: Path) -> None:
    by_step = zip(range(STEPS), *runs, strict=True)
    rows = [[t, *(f"{value:.6f}" for value in values)] for t, *values in by_step]
    write_csv(path, ["t", *METHODS], rows, **provenance())


def differences(rows: list[Row]) -> list[str]:
    """Return the numbers that differ from the thesis's in the digits that it prints."""
    return [
        f"{row['method']}, {name}: {number}, printed {printed}"
        for row in where(rows, lr=LR)
        for name, number, printed in zip(
            _PRINTED, numbers(row), PUBLISHED[row["method"]], strict=True
        )
        if number != printed
    ]


def numbers(row: Row) -> list[str]:
    """Return the numbers that the thesis prints, with as many digits."""
    return [f"{row[column]:.3f}" for column in _PRINTED]


def late_gaps(rows: list[Row]) -> dict[float, dict[str, float]]:
    """Return the mean of F - F* over the last steps, by learning rate and method."""
    gaps: dict[float, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: float(row["lr"])):
        if row["method"] in SCANNED:
            gaps.setdefault(row["lr"], {})[row["method"]] = row[LATE_GAP]
    return gaps
