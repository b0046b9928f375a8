"""Three quadratics on which compressing both ways ends lower than compressing one way.

    python -m recipes.bidirectional_topk.counterexample

The counterexample of Zou's thesis (2022): rank q holds F_q(w) = 1/2 |w - a_q 1|^2 with a = 1, 5, 10
in 100 dimensions, and one entry is kept in each step. Three processes train it over gloo, through
DDP and ``torchcomp.register``, in float64. The numbers are checked against the thesis's; where one
differs the exit status is 1. A scan of learning rates shows how fragile the order is.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from recipes.errors import told_in_one_line
from recipes.local_ranks import run_on_ranks
from recipes.result_files import make_folder, pyplot, save_figure, write_csv

_HERE = Path(__file__).resolve().parent
CENTRES = (1.0, 5.0, 10.0)
DIMENSIONS = 100
START = 20.0
LR = 0.01
STEPS = 1000
MOMENTS = (300, 500)
TAIL_FROM = 400
# At their mean the three gradients cancel: F* is half the variance of the centres, times d.
LEAST = DIMENSIONS * statistics.pvariance(CENTRES) / 2

METHODS = {
    "unidirectional": "ef(topk(k=1))",
    "bidirectional": 'bidirectional(topk(k=1), topk(k=1), selection="exact")',
    "downlink only": 'bidirectional(identity, topk(k=1), selection="exact")',
}
# As printed, to the digit: F at t = 300 and 500, and the mean of F over t in [400, 1000).
PUBLISHED = {
    "unidirectional": ("698.906", "697.687", "701.309"),
    "bidirectional": ("695.227", "693.113", "692.174"),
    "downlink only": ("677.778", "677.778", "677.778"),
}
RATES = (0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.03)
SCANNED = ("unidirectional", "bidirectional")
# At small rates the way down takes longer: rates are compared by the last steps alone.
LATE_FROM = 800


@dataclass(frozen=True)
class Run:
    """One training run: F before every step."""

    method: str
    lr: float
    values: tuple[float, ...]

    @property
    def numbers(self) -> tuple[float, ...]:
        """What the thesis prints: F at two moments, and its mean over the last 600 steps."""
        return (*(self.values[t] for t in MOMENTS), statistics.fmean(self.values[TAIL_FROM:]))

    @property
    def late_gap(self) -> float:
        """Mean of F - F* over the last steps."""
        return statistics.fmean(self.values[LATE_FROM:]) - LEAST


class Point(nn.Module):
    """A vector, and its distance to one rank's centre."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((DIMENSIONS,), START, dtype=torch.float64))

    def forward(self, centre: float) -> Tensor:
        """Return F_q(w)."""
        return distance(self.w, centre)


def distance(w: Tensor, centre: float) -> Tensor:
    """Return F_q(w) = 1/2 |w - a_q 1|^2."""
    return (w - centre).square().sum() / 2


@told_in_one_line()
def main() -> None:
    """Run, show, compare and write what came out."""
    arguments = parse(sys.argv[1:])
    if not arguments.no_scan:
        make_folder(arguments.out)
    started = time.monotonic()
    jobs = [(method, LR) for method in METHODS]
    if not arguments.no_scan:
        jobs += [(method, lr) for lr in RATES if lr != LR for method in SCANNED]
    runs = on_ranks(jobs)
    print(table([run for run in runs if run.lr == LR]))
    print(f"\nF* = {LEAST:.3f}; learning rate {LR}\n")
    if not arguments.no_scan:
        print(scan_table(runs))
        save(runs, arguments.out)
        print(f"\ncounterexample.csv, counterexample_curves.csv and .png are in {arguments.out}")
    print(f"all together: {time.monotonic() - started:.0f} s")
    differing = differences(runs)
    if differing:
        sys.exit("error: not the thesis's numbers:\n  " + "\n  ".join(differing))
    print("every number is the thesis's, to its last printed digit")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--no-scan", action="store_true", help="the thesis's rate alone; writes no files"
    )
    parser.add_argument("--out", type=Path, default=_HERE / "results", help="folder of the files")
    return parser.parse_args(words)


def on_ranks(jobs: list[tuple[str, float]], steps: int = STEPS) -> list[Run]:
    """Train every (method, learning rate) on three processes over gloo."""
    return run_on_ranks(len(CENTRES), _train_all, jobs, steps)[0]


def _train_all(jobs: list[tuple[str, float]], steps: int) -> list[Run]:
    return [Run(method, lr, train(METHODS[method], lr, steps)) for method, lr in jobs]


def train(spec: str, lr: float, steps: int) -> tuple[float, ...]:
    """Take ``steps`` steps as this rank, and return F before each."""
    centre = CENTRES[dist.get_rank()]
    model = DistributedDataParallel(Point())
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


def differences(runs: list[Run]) -> list[str]:
    """Say which numbers differ from the thesis's, in the digits that it prints."""
    names = [f"F at t = {t}" for t in MOMENTS] + [f"mean F over [{TAIL_FROM}, {STEPS})"]
    return [
        f"{run.method}, {name}: {number:.3f}, printed {printed}"
        for run in runs
        if run.lr == LR
        for name, number, printed in zip(names, run.numbers, PUBLISHED[run.method], strict=True)
        if f"{number:.3f}" != printed
    ]


def table(runs: list[Run]) -> str:
    """Return our numbers beside the thesis's."""
    lines = [f"{'':<15}{'F(300)':>9}{'F(500)':>9}{'mean F':>9}   the thesis prints"]
    for run in runs:
        ours = "".join(f"{number:>9.3f}" for number in run.numbers)
        lines.append(f"{run.method:<15}{ours}   {' / '.join(PUBLISHED[run.method])}")
    return "\n".join(lines)


def scan_table(runs: list[Run]) -> str:
    """Return how far above F* each method stays, by learning rate."""
    lines = [f"mean F - F* over t in [{LATE_FROM}, {STEPS}), by learning rate"]
    lines.append(f"{'lr':<8}" + "".join(f"{method:>16}" for method in SCANNED) + "   lower")
    for lr in RATES:
        gaps = {run.method: run.late_gap for run in runs if run.lr == lr and run.method in SCANNED}
        cells = "".join(f"{gaps[method]:>16.3f}" for method in SCANNED)
        lines.append(f"{lr:<8}{cells}   {min(SCANNED, key=gaps.__getitem__)}")
    return "\n".join(lines)


def save(runs: list[Run], folder: Path) -> None:
    """Write the numbers, the curves and the picture."""
    header = ["lr", "method", *(f"F_at_{t}" for t in MOMENTS), f"mean_F_from_{TAIL_FROM}"]
    header += [f"mean_F_minus_least_from_{LATE_FROM}"]
    ordered = sorted(runs, key=lambda run: run.lr)
    rows = [
        [run.lr, run.method, *(f"{number:.6f}" for number in (*run.numbers, run.late_gap))]
        for run in ordered
    ]
    write_csv(folder / "counterexample.csv", header, rows)
    shown = [run for run in runs if run.lr == LR]
    by_step = zip(range(STEPS), *(run.values for run in shown), strict=True)
    curves = [[t, *(f"{value:.6f}" for value in values)] for t, *values in by_step]
    write_csv(folder / "counterexample_curves.csv", ["t", *METHODS], curves)
    draw(runs, folder / "counterexample.png")


def draw(runs: list[Run], path: Path) -> None:
    """Draw F - F* against t at the thesis's rate, and its late mean against the rate."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    _draw_curves(left, [run for run in runs if run.lr == LR])
    _draw_scan(right, runs)
    save_figure(figure, path)


def _draw_curves(axes: Any, runs: list[Run]) -> None:
    for place, run in enumerate(runs):
        # Below 0.001 there is only rounding, which a log axis would show as noise.
        gaps = [max(value - LEAST, 1e-3) for value in run.values]
        axes.plot(gaps, color=f"C{place}", linewidth=1.5, label=run.method)
    axes.set_yscale("log")
    axes.set_xlabel("step t")
    axes.set_ylabel("F(w) − F*   (cut off at 0.001)")
    axes.set_title(f"3 ranks, one entry of {DIMENSIONS} kept, learning rate {LR}")
    axes.grid(True, alpha=0.3)
    axes.legend()


def _draw_scan(axes: Any, runs: list[Run]) -> None:
    for place, (method, marker) in enumerate(zip(SCANNED, "os", strict=True)):
        points = sorted((run.lr, run.late_gap) for run in runs if run.method == method)
        axes.plot(*zip(*points, strict=True), marker + "-", color=f"C{place}", label=method)
    axes.axvline(LR, color="grey", linestyle=":", linewidth=1)
    axes.set_yscale("log")
    axes.set_xlabel("learning rate (dotted: the thesis's)")
    axes.set_ylabel(f"mean of F(w) − F* over t in [{LATE_FROM}, {STEPS})")
    axes.set_title("How fragile: the order turns with the rate")
    axes.grid(True, alpha=0.3)
    axes.legend()


if __name__ == "__main__":
    main()
