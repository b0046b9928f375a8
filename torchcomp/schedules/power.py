"""Power: rounds that grow as the learning rate falls."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torchcomp.checks import check_count, check_positive
from torchcomp.component import Component
from torchcomp.errors import ScheduleError, SpecError
from torchcomp.schedules.base import Horizon, Schedule


@dataclass(frozen=True)
class Power(Schedule):
    """``power(coef=0.03, exponent=1, h_base=4)``: H = max(h_base, floor((coef / eta)^exponent)).

    eta is the learning rate of the round's first step. During warm-up H = h_base, because a tiny
    warm-up rate would make one round of the whole run. Gu, Lyu, Arora, Zhang, Huang, ICLR 2024
    (arXiv 2310.14423), compare exponent 1, the linear rule H = beta / eta, and exponent 3, the
    cubic rule H = (gamma / eta)^3, with their quadratic one (``qsr``).

    Attributes:
        coef: growth coefficient (beta, alpha or gamma), in units of the learning rate.
        exponent: how fast rounds grow; above 0, whole or not.
        h_base: the shortest round, in steps.
        cap: the longest round, in steps; without it, a rate that falls near 0 makes rounds of
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
        check_bounds(self, self.h_base, self.cap)

    def period(self, step: int, lr: float, horizon: Horizon) -> int:
        if step < horizon.warmup_steps:
            return self.h_base
        if lr == 0:
            raise ScheduleError(
                f"the learning rate at step {step} is 0, and the rule divides by it: end a decay "
                "at a small rate such as 1e-6, or, if this is warm-up, give warmup_steps"
            )
        longest = horizon.total_steps if self.cap is None else min(self.cap, horizon.total_steps)
        try:
            grown = math.floor(min(float((self.coef / lr) ** self.exponent), longest))
        except OverflowError:
            grown = longest
        return max(self.h_base, grown)


def check_bounds(owner: Component, h_base: int, cap: int | None) -> None:
    """Require options `h_base` and `cap` that leave a round between them."""
    check_count("h_base", h_base, owner=owner.name)
    if cap is not None:
        check_count("cap", cap, owner=owner.name)
        if cap < h_base:
            problem = f"cap={cap} is below h_base={h_base}, and no round is shorter than h_base"
            raise SpecError(f"{owner.name}: {problem}", "cap")
