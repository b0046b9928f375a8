"""Tune each method on a grid, then measure the best point of each."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from recipes.qsr.ledger import Ledger
from recipes.qsr.settings import Setting, Study
from recipes.qsr.task import Task
from recipes.qsr.training import PARALLEL, Outcome, Point

EXPONENTS = {"linear": 1, "QSR": 2, "cubic": 3}
_POST_LOCAL_PERIODS = (4, 8, 16)


@dataclass(frozen=True)
class Grid:
    """The points to try: the same number for every method.

    Attributes:
        lrs: peak learning rates of parallel training, by optimizer.
        weight_decays: with each of them, by optimizer. The other methods use the best pair.
        periods: H of constant H.
        bases: H_base of the three rules.
        ratios: the coefficient (alpha, for QSR) divided by the peak learning rate.
        switches: when SWAP stops averaging every step, as a fraction of the steps after warm-up.
            Post-local SGD tries the 3rd, 6th and 9th, with three H after the switch.
        map_bases: H_base of the map.
        map_ratios: alpha divided by the peak learning rate, of the map.
        seeds: how many seeds every point is tried with.
    """

    lrs: Mapping[str, tuple[float, ...]] = field(
        default_factory=lambda: {"sgd": (0.05, 0.1, 0.2), "adamw": (0.001, 0.003, 0.01)}
    )
    weight_decays: Mapping[str, tuple[float, ...]] = field(
        default_factory=lambda: {"sgd": (5e-4, 5e-3, 2e-2), "adamw": (0.1, 0.3, 1.0)}
    )
    periods: tuple[int, ...] = (2, 3, 4, 6, 8, 12, 16, 32, 64)
    bases: tuple[int, ...] = (2, 4, 8)
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    switches: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
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

    def schedules(self, method: str, *, peak: float, total: int, warmup: int) -> list[str]:
        """Return the schedules of another method, for T = ``total`` and W = ``warmup`` steps."""
        if method in EXPONENTS:
            return [
                rule(EXPONENTS[method], peak * ratio, h_base)
                for h_base in self.bases
                for ratio in self.ratios
            ]
        switches = [warmup + round(share * (total - warmup)) for share in self.switches]
        points = {
            "constant H": [f"every({h})" for h in self.periods],
            "post-local": [
                f"post_local(switch={s}, h={h})"
                for s in switches[2::3]
                for h in _POST_LOCAL_PERIODS
            ],
            "SWAP": [f"swap(switch={s})" for s in switches],
        }
        return points[method]


QUICK_GRID = Grid(
    lrs={"sgd": (0.1,), "adamw": (0.003,)},
    weight_decays={"sgd": (5e-4,), "adamw": (0.05,)},
    periods=(4,),
    bases=(2,),
    ratios=(1.0,),
    switches=(0.3, 0.5, 0.7),
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
        tuning_seeds: for tuning only, evaluated on the validation part.
        seeds: the reported ones, evaluated on the test part.
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
        """Tune every method on the validation part and run its best point with all seeds.

        The peak learning rate and the weight decay are those that are best for parallel training.
        All methods use them, as in the paper. Ranks that are processes call this together.
        """
        setting, task = study.setting, self.open_task(study.setting)
        samples = len(task.train.labels)
        tried = {"parallel": self._tune(task, setting, self.grid.parallel(setting.optimizer))}
        best = tried["parallel"]
        horizon = {
            "total": setting.total_steps(samples),
            "warmup": setting.warmup_steps(samples),
        }
        for method in study.methods:
            if method != "parallel":
                schedules = self.grid.schedules(method, peak=best.lr, **horizon)
                points = [Point(method, each, best.lr, best.weight_decay) for each in schedules]
                tried[method] = self._tune(task, setting, points)
            self._measure(task, setting, tried[method], self.seeds, "test", curve=study.curves)
        if study.map:
            for h_base in self.grid.map_bases:
                for ratio in self.grid.map_ratios:
                    schedule = rule(2, best.lr * ratio, h_base)
                    point = Point("QSR", schedule, best.lr, best.weight_decay)
                    self._measure(task, setting, point, self.tuning_seeds, "validation")

    def _tune(self, task: Task, setting: Setting, points: Sequence[Point]) -> Point:
        """Return the point of highest validation accuracy; among equals, of least traffic."""

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
