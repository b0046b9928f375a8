"""Tune each method on a grid, then measure the best point of each."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from recipes.qsr.ledger import Ledger
from recipes.qsr.settings import Setting, Study
from recipes.qsr.task import Task
from recipes.qsr.training import PARALLEL, Outcome, Point
from torchcomp.schedules import Horizon

EXPONENTS = {"linear": 1, "QSR": 2, "cubic": 3}
_HALF = 0.5


@dataclass(frozen=True)
class Grid:
    """The points to try: the same number for every method.

    Attributes:
        lrs: peak learning rates of parallel training, by optimizer. The others use the best.
        weight_decays: of all methods, by optimizer. Each method uses its own best.
        periods: H of constant H, and of post-local SGD after half of the steps.
        rules: H_base and the coefficient (alpha, for QSR) divided by the peak learning rate.
        switches: when SWAP stops averaging every step, as a fraction of the steps after warm-up.
        map_bases: H_base of the map.
        map_ratios: alpha divided by the peak learning rate, of the map.
        seeds: how many seeds every point is tried with.
    """

    lrs: Mapping[str, tuple[float, ...]] = field(
        default_factory=lambda: {"sgd": (0.05, 0.1, 0.2), "adamw": (0.001, 0.003, 0.01)}
    )
    weight_decays: Mapping[str, tuple[float, ...]] = field(
        default_factory=lambda: {"sgd": (5e-4, 5e-3, 2e-2), "adamw": (0.1, 0.5, 2.0)}
    )
    periods: tuple[int, ...] = (2, 4, 8)
    rules: tuple[tuple[int, float], ...] = ((2, 1.0), (4, 1.0), (4, 2.0))
    switches: tuple[float, ...] = (0.5, 0.7, 0.9)
    map_bases: tuple[int, ...] = (2, 4, 8, 16)
    map_ratios: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    seeds: int = 3

    def parallel(self, optimizer: str) -> list[Point]:
        """Return the points of parallel training."""
        return [
            Point(PARALLEL, PARALLEL, lr, weight_decay)
            for lr in self.lrs[optimizer]
            for weight_decay in self.weight_decays[optimizer]
        ]

    def local(self, method: str, optimizer: str, *, peak: float, horizon: Horizon) -> list[Point]:
        """Return the points of another method, at the peak learning rate of parallel training."""
        return [
            Point(method, schedule, peak, weight_decay)
            for schedule in self._schedules(method, peak, horizon)
            for weight_decay in self.weight_decays[optimizer]
        ]

    def _schedules(self, method: str, peak: float, horizon: Horizon) -> list[str]:
        if method in EXPONENTS:
            exponent = EXPONENTS[method]
            return [rule(exponent, peak * ratio, h_base) for h_base, ratio in self.rules]
        decaying = horizon.total_steps - horizon.warmup_steps
        half, *switches = (
            horizon.warmup_steps + round(share * decaying) for share in (_HALF, *self.switches)
        )
        schedules = {
            "constant H": [f"every({h})" for h in self.periods],
            "post-local": [f"post_local(switch={half}, h={h})" for h in self.periods],
            "SWAP": [f"swap(switch={switch})" for switch in switches],
        }
        return schedules[method]


QUICK_GRID = Grid(
    lrs={"sgd": (0.1,), "adamw": (0.003,)},
    weight_decays={"sgd": (5e-4,), "adamw": (0.1,)},
    periods=(4,),
    rules=((2, 1.0),),
    switches=(0.5,),
    map_bases=(2, 4),
    map_ratios=(0.5, 1.0),
    seeds=1,
)


def rule(exponent: int, coefficient: float, h_base: int) -> str:
    """Return the schedule H = max(h_base, floor((coefficient / lr)^exponent))."""
    if exponent == 2:
        return f"qsr(alpha={coefficient:g}, h_base={h_base})"
    return f"power(coef={coefficient:g}, exponent={exponent}, h_base={h_base})"


class Train(Protocol):
    """Trains a point with several seeds: on this rank, or on simulated ones."""

    def __call__(
        self,
        task: Task,
        setting: Setting,
        point: Point,
        *,
        seeds: Sequence[int],
        part: str,
        curve: bool,
    ) -> list[Outcome]:
        """Return an outcome per seed."""


@dataclass(frozen=True)
class Laboratory:
    """Trains points, unless the ledger has their outcome.

    Attributes:
        train: trains a point.
        ledger: stores the outcomes.
        open_task: opens the data of a setting.
        grid: the points to try.
        tuning_seeds: for tuning only, on the "validation" part.
        seeds: the reported ones, on the "test" part.
        report: called with a line of text per measured point.
    """

    train: Train
    ledger: Ledger
    open_task: Callable[[Setting], Task]
    grid: Grid
    tuning_seeds: Sequence[int]
    seeds: Sequence[int]
    report: Callable[[str], None]

    def run(self, study: Study) -> None:
        """Tune every method and run its best point with all seeds.

        All methods use the peak learning rate that is best for parallel training, and each uses its
        own weight decay, as in the paper. Ranks that are processes call this together.
        """
        setting, task = study.setting, self.open_task(study.setting)
        horizon = Horizon(setting.total_steps(task.samples), setting.warmup_steps(task.samples))
        optimizer = setting.optimizer
        best = {"parallel": self._tune(task, setting, self.grid.parallel(optimizer))}
        peak = best["parallel"].lr
        for method in study.methods:
            if method != "parallel":
                points = self.grid.local(method, optimizer, peak=peak, horizon=horizon)
                best[method] = self._tune(task, setting, points)
            self._measure(task, setting, best[method], self.seeds, "test", curve=study.curves)
        if study.map:
            for h_base, ratio in itertools.product(self.grid.map_bases, self.grid.map_ratios):
                point = replace(best["QSR"], schedule=rule(2, peak * ratio, h_base))
                self._measure(task, setting, point, self.tuning_seeds, "validation")

    def _tune(self, task: Task, setting: Setting, points: Sequence[Point]) -> Point:
        """Return the point of highest accuracy in tuning; among equals, that of least traffic."""

        def merit(point: Point) -> tuple[float, int]:
            found = self._measure(task, setting, point, self.tuning_seeds, "validation").values()
            # A run that diverged sent nothing. It is no better for that.
            return statistics.fmean(each.accuracy for each in found), -max(e.nbytes for e in found)

        return max(points, key=merit)

    def _measure(
        self,
        task: Task,
        setting: Setting,
        point: Point,
        seeds: Sequence[int],
        part: str,
        *,
        curve: bool = False,
    ) -> dict[int, Outcome]:
        found = self.ledger.outcomes(
            *(setting, point, seeds, part),
            lambda missing: self.train(task, setting, point, seeds=missing, part=part, curve=curve),
        )
        accuracy = statistics.fmean(outcome.accuracy for outcome in found.values())
        syncs = max(outcome.syncs for outcome in found.values())
        self.report(
            f"{part:<11}{point.schedule:<40}lr {point.lr:<6g} decay {point.weight_decay:<6g}"
            f"{accuracy:6.2f} %{syncs:8,} syncs"
        )
        return found
