"""Every: a constant number of local steps."""

from dataclasses import dataclass
from typing import ClassVar

from torchcomp.local_sgd.schedules.base import Horizon, Schedule
from torchcomp.specs.checks import check_count


@dataclass(frozen=True)
class Every(Schedule):
    """``every(4)``: average after every 4 local steps.

    Also during warm-up. ``every(1)`` averages the parameters after each step. Reference: Stich,
    "Local SGD converges fast and communicates little", ICLR 2019.

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
