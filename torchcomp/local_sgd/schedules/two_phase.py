"""PostLocal and Swap: synchronise every step up to a switch, and less often after it."""

from dataclasses import dataclass
from typing import ClassVar

from torchcomp.local_sgd.schedules.base import Horizon, Schedule
from torchcomp.specs.checks import check_count
from torchcomp.specs.errors import SpecError


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

    Source: Lin, Stich, Patel, Jaggi, "Don't use large mini-batches, use local SGD", ICLR 2020
    (post-local SGD).

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
