"""The rules that spec strings can name: constant rounds, growing rounds, and two phases."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torchcomp.local_sgd.schedules.base import Horizon, Schedule
from torchcomp.specs.checks import check_count, check_positive
from torchcomp.specs.errors import ScheduleError, SpecError


@dataclass(frozen=True)
class Every(Schedule):
    """``every(4)``: average after every 4 local steps, also during warm-up.

    ``every(1)`` averages the parameters after each step. Reference: Stich, "Local SGD converges
    fast and communicates little", ICLR 2019.

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
    the round's first step. During warm-up H = h_base. Gu, Lyu, Arora, Zhang, Huang, ICLR 2024
    (arXiv 2310.14423), compare three exponents: 1, the linear rule H = beta / eta; 2, their
    quadratic rule (``qsr``); and 3, the cubic rule H = (gamma / eta)^3.

    Attributes:
        coef: growth coefficient (beta, alpha or gamma), in units of the learning rate.
        exponent: how fast rounds grow; above 0, not necessarily an integer.
        h_base: the shortest round, in steps.
        cap: the longest round, in steps. Without it, a learning rate near 0 gives rounds of
            thousands of steps.
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
        # The rule would turn the tiny learning rates of warm-up into one round for the whole run.
        if step < horizon.warmup_steps:
            return self.h_base
        if lr == 0:
            raise ScheduleError(
                f"the learning rate at step {step} is 0, and the rule divides by it: let the "
                "decay end at a small value such as 1e-6, or pass warmup_steps if this is warm-up"
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

    This is the Quadratic Synchronization Rule. A round that begins at learning rate eta takes H =
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
        check_count("cap", cap, owner=owner.name)
        if cap < h_base:
            problem = f"cap must be at least h_base, but cap={cap} is below h_base={h_base}"
            raise SpecError(f"{owner.name}: {problem}", "cap")


@dataclass(frozen=True)
class TwoPhase(Schedule):
    """A schedule that averages after every step up to step `switch`."""

    positional: ClassVar[int] = 0

    switch: int

    def __post_init__(self) -> None:
        check_count("switch", self.switch, least=0, owner=self.name)

    # Not in __post_init__: a schedule is built before the length of the run is known.
    def check(self, horizon: Horizon) -> None:
        # Warm-up belongs to the first phase, and the second needs at least one step.
        if not horizon.warmup_steps <= self.switch < horizon.total_steps:
            raise SpecError(
                f"{self.name}: switch={self.switch} must be at or after the end of warm-up, step "
                f"{horizon.warmup_steps}, and before the end of the run, {horizon.total_steps}",
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
