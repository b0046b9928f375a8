"""Three quadratics on which compressing both ways ends lower than compressing one way.

This is the counterexample of Zou's thesis (2022). Rank q has F_q(w) = 1/2 |w - a_q 1|^2 with
a = 1, 5, 10 in 100 dimensions, and each step keeps one entry. Three processes train it in float64
over gloo, through DDP and ``torchcomp.register``. :func:`differences` checks the numbers against
those printed in the thesis. A scan of learning rates shows that the order of the two methods
depends on the learning rate.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from recipes.experiments import ResultTable
from recipes.local_ranks import run_on_ranks
from recipes.result_files import write_csv

CENTRES = (1.0, 5.0, 10.0)
DIMENSIONS = 100
START = 20.0
LR = 0.01
STEPS = 1000
MOMENTS = (300, 500)
TAIL_FROM = 400
# At the mean of the centres the three gradients cancel. F* is d times half their variance.
MINIMUM = DIMENSIONS * statistics.pvariance(CENTRES) / 2

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
QUICK_LRS = (0.005, LR)
SCANNED = ("unidirectional", "bidirectional")
# Small learning rates take longer to descend, so the scan compares only the last steps.
LATE_FROM = 800

LATE_GAP = f"mean_F_minus_least_from_{LATE_FROM}"
_NUMBERS = (*(f"F_at_{t}" for t in MOMENTS), f"mean_F_from_{TAIL_FROM}")
COLUMNS = ("lr", "method", *_NUMBERS, LATE_GAP)
TASK = f"{len(CENTRES)} ranks, d = {DIMENSIONS}, {STEPS} steps"
TABLE = "counterexample.csv"
CURVES = "counterexample_curves.csv"

Row = dict[str, str]
"""A row of a result table, as texts by column."""
Jobs = list[tuple[str, float]]
"""Methods and learning rates of runs."""


@dataclass(frozen=True)
class CounterexampleRun:
    """One training run.

    Attributes:
        method: its name in :data:`METHODS`.
        lr: learning rate.
        values: F before every step.
    """

    method: str
    lr: float
    values: tuple[float, ...]

    def cells(self) -> list[object]:
        """Return the run's row of the CSV."""
        printed = (*(self.values[t] for t in MOMENTS), statistics.fmean(self.values[TAIL_FROM:]))
        gap = statistics.fmean(self.values[LATE_FROM:]) - MINIMUM
        return [self.lr, self.method, *(f"{number:.6f}" for number in (*printed, gap))]


class Quadratic(nn.Module):
    """F_q of one rank, as a function of the vector w that all ranks train."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((DIMENSIONS,), START, dtype=torch.float64))

    def forward(self, centre: float) -> Tensor:
        """Return F_q(w)."""
        return distance(self.w, centre)


def distance(w: Tensor, centre: float) -> Tensor:
    """Return F_q(w) = 1/2 |w - a_q 1|^2."""
    return (w - centre).square().sum() / 2


def missing(lrs: Sequence[float], table: ResultTable) -> list[Jobs]:
    """Return the runs that the table lacks, in groups that are saved together."""
    # The picture needs the curves of all methods at the thesis's learning rate.
    thesis = [(method, LR) for method in METHODS]
    groups = [thesis, *([(method, lr)] for lr in lrs if lr != LR for method in SCANNED)]
    finished = {_job(row) for row in table.rows}
    found = [group for group in groups if not finished.issuperset(group)]
    if thesis not in found and not (table.path.parent / CURVES).exists():
        found.insert(0, thesis)
    return found


def run(lrs: Sequence[float], table: ResultTable) -> None:
    """Train on three processes what the table lacks; save each group of runs as it ends."""
    groups = missing(lrs, table)
    if not groups:
        return
    again = {job for group in groups for job in group}
    table.rows = [row for row in table.rows if _job(row) not in again]
    table.save()
    table.rows = run_on_ranks(len(CENTRES), _train_groups, groups, table)[0]
    table.rows.sort(key=lambda row: float(row["lr"]))
    table.save()


def on_ranks(jobs: Jobs, steps: int = STEPS) -> list[CounterexampleRun]:
    """Train every (method, learning rate) on three processes over gloo."""
    return run_on_ranks(len(CENTRES), _train_jobs, jobs, steps)[0]


def _train_groups(groups: list[Jobs], table: ResultTable) -> list[dict[str, str]]:
    for jobs in groups:
        runs = _train_jobs(jobs, STEPS)
        # Rank 0 saves each group, so that an interruption loses one group and not the whole scan.
        if dist.get_rank() == 0:
            if len(jobs) == len(METHODS):
                _write_curves(runs, table.path.parent / CURVES)
            table.add(*(each.cells() for each in runs))
    return table.rows


def _train_jobs(jobs: Jobs, steps: int) -> list[CounterexampleRun]:
    return [CounterexampleRun(m, lr, train(METHODS[m], lr, steps)) for m, lr in jobs]


def train(spec: str, lr: float, steps: int) -> tuple[float, ...]:
    """Take ``steps`` steps as this rank, and return F before each."""
    centre = CENTRES[dist.get_rank()]
    model = DistributedDataParallel(Quadratic())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    values = []
    with torchcomp.register(model, spec):
        for _ in range(steps):
            w = model.module.w.detach()
            values.append(statistics.fmean(float(distance(w, a)) for a in CENTRES))
            optimizer.zero_grad()
            model(centre).backward()
            optimizer.step()
    return tuple(values)


def _write_curves(runs: list[CounterexampleRun], path: Path) -> None:
    by_step = zip(range(STEPS), *(each.values for each in runs), strict=True)
    curves = [[t, *(f"{value:.6f}" for value in values)] for t, *values in by_step]
    write_csv(path, ["t", *METHODS], curves)


def differences(rows: list[Row]) -> list[str]:
    """Return the numbers that differ from the thesis's in the digits that it prints."""
    names = [f"F at t = {t}" for t in MOMENTS] + [f"mean F over [{TAIL_FROM}, {STEPS})"]
    found = []
    for row in at_thesis_lr(rows):
        printed_ones = PUBLISHED[row["method"]]
        for name, number, printed in zip(names, numbers(row), printed_ones, strict=True):
            if number != printed:
                found.append(f"{row['method']}, {name}: {number}, printed {printed}")
    return found


def numbers(row: Row) -> list[str]:
    """Return the numbers that the thesis prints, with as many digits."""
    return [f"{float(row[column]):.3f}" for column in _NUMBERS]


def at_thesis_lr(rows: list[Row]) -> list[Row]:
    """Return the rows at the learning rate of the thesis."""
    return [row for row in rows if float(row["lr"]) == LR]


def late_gaps(rows: list[Row]) -> dict[float, dict[str, float]]:
    """Return the mean of F - F* over the last steps, by learning rate and method."""
    gaps: dict[float, dict[str, float]] = {}
    for row in rows:
        if row["method"] in SCANNED:
            gaps.setdefault(float(row["lr"]), {})[row["method"]] = float(row[LATE_GAP])
    return gaps


def _job(row: Row) -> tuple[str, float]:
    return row["method"], float(row["lr"])
