"""PostLocal and Swap: every step up to a switch, and fewer synchronisations after it."""

from dataclasses import dataclass
from typing import ClassVar

from torchcomp.checks import check_count
from torchcomp.errors import SpecError
from torchcomp.schedules.base import Horizon, Schedule


@dataclass(frozen=True)
class TwoPhase(Schedule):
    """A schedule that averages after every step up to step `switch`.

    Attributes:
        switch: the step, counted from 1, at which the last round of one step ends; from the end of
            warm-up to before the end of the run.
    """

    positional: ClassVar[int] = 0

    switch: int

    def __post_init__(self) -> None:
        check_count("switch", self.switch, least=0, owner=self.name)

    def check(self, horizon: Horizon) -> None:
        if not horizon.warmup_steps <= self.switch < horizon.total_steps:
            raise SpecError(
                f"{self.name}: switch={self.switch} must lie from the end of warm-up "
                f"({horizon.warmup_steps}) to before the end of the run ({horizon.total_steps}), "
                "because warm-up belongs to the first phase and the second has to begin",
                "switch",
            )


@dataclass(frozen=True)
class PostLocal(TwoPhase):
    """``post_local(switch=30000, h=8)``: every step up to `switch`, then every h steps.

    Source: Lin, Stich, Patel, Jaggi, "Don't use large mini-batches, use local SGD", ICLR 2020
    (post-local SGD).

    Attributes:
        switch: as for TwoPhase.
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
    """``swap(switch=30000)``: every step up to `switch`, then one average at the end of the run.

    Source: Gupta, Akle Serrano, DeCoste, "Stochastic weight averaging in parallel: large-batch
    training that generalizes well", ICLR 2020 (SWAP).
    """

    name: ClassVar[str] = "swap"
    example: ClassVar[str] = "swap(switch=30000)"

    def period(self, step: int, lr: float, horizon: Horizon) -> int:
        return 1 if step < self.switch else horizon.total_steps - step
