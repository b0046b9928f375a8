"""Schedule: a pure function of the step, the learning rate and the lengths of warm-up and run.

All ranks compute the same result without communication.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torchcomp.specs.checks import check_count, is_number
from torchcomp.specs.component import Component
from torchcomp.specs.errors import ScheduleError, SpecError
from torchcomp.specs.learning_rates import LRFunction


@dataclass(frozen=True)
class Horizon:
    """The lengths of the run and of its warm-up, in optimizer steps."""

    total_steps: int  # T, at least 1; the run ends with a synchronisation at exactly this step
    warmup_steps: int = 0  # W, from 0 to T; the first W steps have warm-up learning rates

    def __post_init__(self) -> None:
        # Scripts compute these, as in 0.1 * total_steps, and get floats. Take those that are whole,
        # and NumPy's integers, as Python's, because checkpoints contain them.
        for name, least in (("total_steps", 1), ("warmup_steps", 0)):
            value = getattr(self, name)
            if is_number(value) and float(value).is_integer():
                object.__setattr__(self, name, int(value))
            check_count(name, getattr(self, name), least)
        if self.warmup_steps > self.total_steps:
            raise SpecError(
                f"warmup_steps must be at most total_steps, but warm-up ({self.warmup_steps} "
                f"steps) is longer than the run ({self.total_steps} steps)"
            )


@dataclass(frozen=True)
class Schedule(Component):
    """Decides how many local steps a round takes."""

    kind: ClassVar[str] = "schedule"
    reads_lr: ClassVar[bool] = False  # whether the length of a round depends on the learning rate

    def check(self, horizon: Horizon) -> None:
        """Raise SpecError if the schedule does not fit a run of this length."""

    @abstractmethod
    def period(self, step: int, lr: float, horizon: Horizon) -> int:
        """Return H, the number of local steps of the round that begins after `step` steps.

        `lr` is the learning rate of the round's first step, finite and at least 0. Raise
        ScheduleError if the rule cannot use it. :meth:`round_end` shortens the last round.
        """

    def round_end(self, step: int, lr: float, horizon: Horizon) -> int:
        """Return the step, counted from 1, after which the ranks synchronise.

        Raises ScheduleError if `lr` is not a finite number of at least 0.
        """
        # Not checks.is_number: a user's function can also return a 0-D tensor.
        try:
            usable = math.isfinite(lr) and lr >= 0
        except (TypeError, OverflowError):  # OverflowError: an int beyond the range of floats
            usable = False
        if not usable:
            raise ScheduleError(
                f"the learning rate at step {step} is {lr!r}, but must be a finite number of at "
                "least 0"
            )
        # As Python's int: options can be NumPy's, which wrap around and do not fit a checkpoint.
        return min(step + int(self.period(step, float(lr), horizon)), horizon.total_steps)


def synchronisations(schedule: Schedule, lr: LRFunction | None, horizon: Horizon) -> list[int]:
    """Like :func:`torchcomp.sync_steps`, for a schedule that is already built."""
    schedule.check(horizon)
    if lr is None and schedule.reads_lr:
        raise SpecError(
            f"'{schedule}' depends on the learning rate: pass lr, a function of the step"
        )
    if lr is not None and not callable(lr):
        raise SpecError(f"lr must be a function of the step, such as lambda step: 0.1, not {lr!r}")
    ends = [0]
    while ends[-1] < horizon.total_steps:
        # Once per round, at its first step. Without `lr`, the schedule does not read it.
        first_lr = 1.0 if lr is None else lr(ends[-1])
        ends.append(schedule.round_end(ends[-1], first_lr, horizon))
    return ends[1:]
