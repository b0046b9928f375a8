"""Schedule: when local steps end in a synchronisation.

A schedule is a pure function of progress: the step at which a round begins, the learning rate of
its first step, and where warm-up and the run end. All ranks evaluate it with the same arguments,
so they agree without a message.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torchcomp.component import Component, check_count, check_positive
from torchcomp.errors import ScheduleError, SpecError


@dataclass(frozen=True)
class Horizon:
    """Where warm-up ends and where the run ends, in optimizer steps.

    Attributes:
        total_steps: T, at least 1; the run ends with a synchronisation at exactly this step.
        warmup_steps: W, from 0 to T; the first W steps have warm-up learning rates.
    """

    total_steps: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        for name, least in (("total_steps", 1), ("warmup_steps", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SpecError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if self.warmup_steps > self.total_steps:
            raise SpecError(
                f"warm-up ({self.warmup_steps} steps) is longer than the run "
                f"({self.total_steps} steps)"
            )


@dataclass(frozen=True)
class Schedule(Component):
    """Decides how many local steps a round takes.

    Class attributes:
        reads_rate: whether the learning rate decides.
    """

    kind: ClassVar[str] = "schedule"
    reads_rate: ClassVar[bool] = False

    @abstractmethod
    def period(self, step: int, rate: float, horizon: Horizon) -> int:
        """H: local steps of the round that begins after `step` steps, before it is cut at the end.

        Args:
            step: optimizer steps taken so far.
            rate: learning rate of the round's first step; finite and at least 0.
            horizon: ends of warm-up and run.

        Raises:
            ScheduleError: if the rule cannot use the rate.
        """

    def round_end(self, step: int, rate: float, horizon: Horizon) -> int:
        """The step, counted from 1, whose end is the round's synchronisation.

        Raises:
            ScheduleError: if the rate is negative or not finite, or 0 where the rule reads it.
        """
        if not math.isfinite(rate) or rate < 0:
            raise ScheduleError(
                f"the learning rate at step {step} is {rate!r}, and a rate is a finite number of "
                "at least 0"
            )
        return min(step + self.period(step, rate, horizon), horizon.total_steps)


@dataclass(frozen=True)
class Every(Schedule):
    """``every(h)``: average after every h local steps. ``every(1)`` is parallel training.

    Attributes:
        h: local steps between synchronisations.
    """

    name: ClassVar[str] = "every"
    example: ClassVar[str] = "every(4)"

    h: int

    def __post_init__(self) -> None:
        check_count(self, "h")

    def period(self, step: int, rate: float, horizon: Horizon) -> int:
        return self.h


@dataclass(frozen=True)
class QSR(Schedule):
    """``qsr(alpha=0.0175, h_base=4)``: the Quadratic Synchronization Rule.

    A round that begins at learning rate eta takes H = max(h_base, floor((alpha / eta)^2)) steps;
    during warm-up H = h_base, because a tiny warm-up rate would make one round of the whole run.
    Source: Gu, Lyu, Arora, Zhang, Huang, ICLR 2024 (arXiv 2310.14423), Algorithm 2 with its rule
    for H.

    Attributes:
        alpha: growth coefficient, in units of the learning rate.
        h_base: the shortest round, in steps.
    """

    name: ClassVar[str] = "qsr"
    positional: ClassVar[int] = 0
    reads_rate: ClassVar[bool] = True
    example: ClassVar[str] = "qsr(alpha=0.0175, h_base=4)"

    alpha: float
    h_base: int

    def __post_init__(self) -> None:
        check_positive(self, "alpha")
        check_count(self, "h_base")

    def period(self, step: int, rate: float, horizon: Horizon) -> int:
        if step < horizon.warmup_steps:
            return self.h_base
        if rate == 0:
            raise ScheduleError(
                f"the learning rate at step {step} is 0, and {self.name} divides by it: end a "
                "decay at a small rate such as 1e-6, or, if this is warm-up, give warmup_steps"
            )
        ratio = self.alpha / rate
        square = min(ratio * ratio, float(horizon.total_steps))
        return max(self.h_base, math.floor(square))


SCHEDULES: tuple[type[Schedule], ...] = (
    Every,
    QSR,
)


def synchronisations(schedule: Schedule, lr: Callable[[int], float], horizon: Horizon) -> list[int]:
    """The steps, counted from 1 after the step, at which a run synchronises.

    Args:
        schedule: the rule.
        lr: learning rate of the step that follows `step` earlier ones (0 for the first).
        horizon: ends of warm-up and run.

    Raises:
        ScheduleError: if the schedule cannot use a rate.
    """
    steps: list[int] = []
    step = 0
    while step < horizon.total_steps:
        step = schedule.round_end(step, lr(step), horizon)
        steps.append(step)
    return steps
