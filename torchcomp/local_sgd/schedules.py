"""Schedules: after which local steps the ranks synchronise, a pure function of step and lr."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torchcomp.specs.checks import check_count, check_positive, is_number
from torchcomp.specs.component import Component
from torchcomp.specs.errors import ScheduleError, SpecError
from torchcomp.specs.learning_rates import LRFunction


@dataclass(frozen=True)
class Horizon:
    """The lengths of the run and of its warm-up, in optimizer steps."""

    total_steps: int  # T, at least 1; the run ends with a synchronisation at exactly this step
    warmup_steps: int = 0  # W, from 0 to T; the first W steps have warm-up learning rates

    def __post_init__(self) -> None:
        # Take whole floats, as in 0.1 * total_steps, and NumPy's integers as Python's.
        for name, least in (("total_steps", 1), ("warmup_steps", 0)):
            value = getattr(self, name)
            if is_number(value) and float(value).is_integer():
                object.__setattr__(self, name, int(value))
            check_count(name, getattr(self, name), least)
        if self.warmup_steps > self.total_steps:
            problem = f"warmup_steps={self.warmup_steps} is above total_steps={self.total_steps}"
            raise SpecError(problem)


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

        `lr` is that of its first step. Raise ScheduleError if the rule cannot use it.
        """

    def round_end(self, step: int, lr: float, horizon: Horizon) -> int:
        """Return the step, counted from 1, after which the ranks synchronise."""
        # Not checks.is_number: a user's function can also return a 0-D tensor.
        try:
            usable = math.isfinite(lr) and lr >= 0
        except (TypeError, OverflowError):  # OverflowError: an int beyond the range of floats
            usable = False
        if not usable:
            problem = f"the learning rate at step {step} is {lr!r}"
            raise ScheduleError(f"{problem}, but must be a finite number of at least 0")
        # As Python's int: NumPy's wrap around and do not fit a checkpoint.
        return min(step + int(self.period(step, float(lr), horizon)), horizon.total_steps)


@dataclass(frozen=True)
class Every(Schedule):
    """``every(4)``: average after every 4 local steps, also during warm-up.

    Source: Stich, "Local SGD converges fast and communicates little", ICLR 2019.

    Attributes:
        h: local steps between synchronisations.
    """

    name: ClassVar[str] = "every"
    example: ClassVar[str] = "every(4)"

    h: int

    def __post_init__(self) -> None:
        check_count("h", self.h, owner=self.name)

    def period(self, step: int, lr: float, horizon: Horizon) -> int:
        return self.h


@dataclass(frozen=True)
class Power(Schedule):
    """``power(coef=0.03, exponent=1, h_base=4)``: rounds grow with a power of 1 / lr.

    A round takes H = max(h_base, floor((coef / eta)^exponent)) steps. eta is the learning rate of
    the round's first step. During warm-up H = h_base. Gu et al., ICLR 2024 (arXiv 2310.14423),
    compare the exponents 1, 2 (their quadratic rule, ``qsr``) and 3.

    Attributes:
        coef: growth coefficient, in units of the learning rate.
        exponent: how fast rounds grow; above 0, not necessarily an integer.
        h_base: the shortest round, in steps.
        cap: the longest round, in steps.
    """

    name: ClassVar[str] = "power"
    positional: ClassVar[int] = 0
    reads_lr: ClassVar[bool] = True
    example: ClassVar[str] = "power(coef=0.03, exponent=1, h_base=4)"

    coef: float
    exponent: float
    h_base: int
    cap: int | None = None

    def __post_init__(self) -> None:
        check_positive("coef", self.coef, owner=self.name)
        check_positive("exponent", self.exponent, owner=self.name)
        _check_bounds(self, self.h_base, self.cap)

    def period(self, step: int, lr: float, horizon: Horizon) -> int:
        if step < horizon.warmup_steps:
            return self.h_base
        if lr == 0:
            raise ScheduleError(
                f"the learning rate at step {step} is 0, and the rule divides by it: end the decay "
                "at a small value such as 1e-6, or pass warmup_steps if this is warm-up"
            )
        # Limit the quotient before math.floor, which raises for infinity.
        longest = horizon.total_steps if self.cap is None else min(self.cap, horizon.total_steps)
        try:
            grown = math.floor(min(float((self.coef / lr) ** self.exponent), longest))
        except OverflowError:  # from **; a float division returns infinity instead
            grown = longest
        return max(self.h_base, grown)


@dataclass(frozen=True)
class QSR(Schedule):
    """``qsr(alpha=0.0175, h_base=4)``: rounds grow with the square of 1 / lr.

    The Quadratic Synchronization Rule. A round that begins at learning rate eta takes H =
    max(h_base, floor((alpha / eta)^2)) steps. During warm-up it takes h_base steps. Source: Gu,
    Lyu, Arora, Zhang, Huang, ICLR 2024 (arXiv 2310.14423), Algorithm 2 with its rule for H.

    Attributes:
        alpha: growth coefficient, in units of the learning rate.
        h_base: the shortest round, in steps.
        cap: the longest round, in steps; the paper has none.
    """

    name: ClassVar[str] = "qsr"
    positional: ClassVar[int] = 0
    reads_lr: ClassVar[bool] = True
    example: ClassVar[str] = "qsr(alpha=0.0175, h_base=4)"

    alpha: float
    h_base: int
    cap: int | None = None

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha, owner=self.name)
        _check_bounds(self, self.h_base, self.cap)

    def period(self, step: int, lr: float, horizon: Horizon) -> int:
        return Power(self.alpha, 2, self.h_base, self.cap).period(step, lr, horizon)


def _check_bounds(owner: Schedule, h_base: int, cap: int | None) -> None:
    check_count("h_base", h_base, owner=owner.name)
    if cap is not None:
        check_count("cap", cap, least=int(h_base), owner=owner.name)


@dataclass(frozen=True)
class TwoPhase(Schedule):
    """Averages after every step up to step `switch`."""

    positional: ClassVar[int] = 0

    switch: int

    def __post_init__(self) -> None:
        check_count("switch", self.switch, least=0, owner=self.name)

    def check(self, horizon: Horizon) -> None:
        # Warm-up belongs to the first phase, and the second needs at least one step.
        if not horizon.warmup_steps <= self.switch < horizon.total_steps:
            raise SpecError(
                f"{self.name}: switch={self.switch} must be from the end of warm-up, step "
                f"{horizon.warmup_steps}, to before that of the run, {horizon.total_steps}",
                "switch",
            )


@dataclass(frozen=True)
class PostLocal(TwoPhase):
    """``post_local(switch=30000, h=8)``: every step, later every 8 steps.

    Source: Lin, Stich, Patel, Jaggi, "Don't use large mini-batches, use local SGD", ICLR 2020.

    Attributes:
        switch: the last step of the first phase, counted from 1; before the end of the run.
        h: local steps between synchronisations after the switch.
    """

    name: ClassVar[str] = "post_local"
    example: ClassVar[str] = "post_local(switch=30000, h=8)"

    h: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("h", self.h, owner=self.name)

    def period(self, step: int, lr: float, horizon: Horizon) -> int:
        return 1 if step < self.switch else self.h


@dataclass(frozen=True)
class Swap(TwoPhase):
    """``swap(switch=30000)``: every step, later once at the end.

    Source: Gupta, Akle Serrano, DeCoste, "Stochastic weight averaging in parallel: large-batch
    training that generalizes well", ICLR 2020 (SWAP).

    Attributes:
        switch: the last step of the first phase, counted from 1; before the end of the run.
    """

    name: ClassVar[str] = "swap"
    example: ClassVar[str] = "swap(switch=30000)"

    def period(self, step: int, lr: float, horizon: Horizon) -> int:
        return 1 if step < self.switch else horizon.total_steps - step


SCHEDULES: tuple[type[Schedule], ...] = (Every, QSR, Power, PostLocal, Swap)


def synchronisations(schedule: Schedule, lr: LRFunction | None, horizon: Horizon) -> list[int]:
    """Like :func:`torchcomp.sync_steps`, for a schedule that is already built."""
    schedule.check(horizon)
    if lr is None and schedule.reads_lr:
        raise SpecError(f"'{schedule}' depends on lr: pass lr, a function of the step")
    if lr is not None and not callable(lr):
        raise SpecError(f"lr must be a function of the step, such as lambda step: 0.1, not {lr!r}")
    ends = [0]
    while ends[-1] < horizon.total_steps:
        first_lr = 1.0 if lr is None else lr(ends[-1])
        ends.append(schedule.round_end(ends[-1], first_lr, horizon))
    return ends[1:]
