"""QSR: the Quadratic Synchronization Rule."""

from dataclasses import dataclass
from typing import ClassVar

from torchcomp.checks import check_positive
from torchcomp.schedules.base import Horizon, Schedule
from torchcomp.schedules.power import Power, check_bounds


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
        check_bounds(self, self.h_base, self.cap)

    def period(self, step: int, lr: float, horizon: Horizon) -> int:
        # Power also implements warm-up, the cap and the error for a learning rate of 0.
        rule = Power(coef=self.alpha, exponent=2, h_base=self.h_base, cap=self.cap)
        return rule.period(step, lr, horizon)
