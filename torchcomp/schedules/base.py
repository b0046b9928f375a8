"""Schedule: when local steps end in a synchronisation.

A schedule is a pure function of the step at which a round begins, the learning rate of its first
step, and the ends of warm-up and run. All ranks evaluate it alike, so they agree without a message.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torchcomp.checks import check_count
from torchcomp.component import Component
from torchcomp.errors import ScheduleError, SpecError
from torchcomp.learning_rates import LRFunction


@dataclass(frozen=True)
class Horizon:
    """Where warm-up ends and where the run ends, in optimizer steps."""

    total_steps: int  # T, at least 1; the run ends with a synchronisation at exactly this step
    warmup_steps: int = 0  # W, from 0 to T; the first W steps have warm-up learning rates

    def __post_init__(self) -> None:
        check_count("total_steps", self.total_steps)
        check_count("warmup_steps", self.warmup_steps, least=0)
        if self.warmup_steps > self.total_steps:
            raise SpecError(
                f"warm-up ({self.warmup_steps} steps) is longer than the run "
                f"({self.total_steps} steps)"
            )


@dataclass(frozen=True)
class Schedule(Component):
    """Decides how many local steps a round takes; `reads_lr` says if the learning rate does."""

    kind: ClassVar[str] = "schedule"
    reads_lr: ClassVar[bool] = False

    def check(self, horizon: Horizon) -> None:
        """Raise SpecError, before a run, if the schedule does not fit it."""

    @abstractmethod
    def period(self, step: int, lr: float, horizon: Horizon) -> int:
        """H: local steps of the round that begins after `step` steps, before it is cut at the end.

        `lr`, finite and at least 0, is that of the round's first step. Raise ScheduleError if the
        rule cannot use it.
        """

    def round_end(self, step: int, lr: float, horizon: Horizon) -> int:
        """The step, counted from 1, at whose end the ranks synchronise; checks `lr`."""
        try:
            usable = math.isfinite(lr) and lr >= 0
        except (TypeError, OverflowError):
            usable = False
        if not usable:
            raise ScheduleError(
                f"the learning rate at step {step} is {lr!r}, and it must be a finite number of "
                "at least 0"
            )
        return min(step + self.period(step, float(lr), horizon), horizon.total_steps)


def synchronisations(schedule: Schedule, lr: LRFunction | None, horizon: Horizon) -> list[int]:
    """What :func:`torchcomp.sync_steps` returns and raises, for a schedule that is built."""
    schedule.check(horizon)
    if lr is None and schedule.reads_lr:
        raise SpecError(f"'{schedule}' reads the learning rate: give lr=, a function of the step")
    if lr is not None and not callable(lr):
        raise SpecError(f"lr must be a function of the step, such as lambda step: 0.1, not {lr!r}")
    ends = [0]
    while ends[-1] < horizon.total_steps:
        rate = 1.0 if lr is None else lr(ends[-1])
        ends.append(schedule.round_end(ends[-1], rate, horizon))
    return ends[1:]
