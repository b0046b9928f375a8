"""Auto: the options of ``register(model, "auto")``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchcomp.aggregators import Aggregator, Mean
from torchcomp.auto.effects import EFFECTS, loss_of
from torchcomp.checks import check_count, is_number, shown
from torchcomp.component import Component
from torchcomp.errors import SpecError

MEAN = Mean()
_DEFAULT = (
    'cast("bf16")',
    'bidirectional(topk(0.01, values="int8"), topk(0.01, values="int8"))',
    'ef(topk(0.01, values="int8"))',
    "powersgd(rank=1)",
)


@dataclass(frozen=True)
class Auto(Component):
    """``auto``: time candidates in the first steps, and go on with the best one.

    Attributes:
        candidates: methods to choose from, in a list, the one that you like most first. ``mean``,
            what plain DDP does, always comes before them.
        within: leaves out candidates that have lost more accuracy than this in the measurements of
            docs/performance.md, such as ``"0.5%"`` for half a percentage point.
        steps: number of steps at most in which the candidates are timed.
    """

    name: ClassVar[str] = "auto"
    kind: ClassVar[str] = "choice"
    positional: ClassVar[int] = 0
    example: ClassVar[str] = 'auto(within="0.5%")'

    candidates: tuple[str | Component, ...] = _DEFAULT
    within: str | None = None
    steps: int = 100

    def __post_init__(self) -> None:
        given: object = self.candidates
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise SpecError(
                f'auto: candidates must be a list such as ["ef(topk(0.01))"], not {shown(given)}',
                "candidates",
            )
        if not given:
            raise SpecError("auto: candidates is empty: name one, or leave it out", "candidates")
        for each in given:
            if not isinstance(each, str | Component):
                raise SpecError(f"auto: a candidate is a method, not {shown(each)}", "candidates")
        # A tuple, because components are hashed.
        object.__setattr__(self, "candidates", tuple(given))
        if self.within is not None:
            _points(self.within)
        check_count("steps", self.steps, owner=self.name)

    def methods(self, candidates: Sequence[Aggregator]) -> tuple[Aggregator, ...]:
        """Return the methods to time: ``mean``, and the candidates that may be chosen.

        Args:
            candidates: the methods that :attr:`candidates` describe.

        Raises:
            SpecError: if one appears twice, if `within` is given and one was not measured, or if
                `within` leaves none.
        """
        kept = [MEAN, *(each for each in candidates if each != MEAN)]
        # By name: a choice is printed and saved as text.
        names = list(map(str, kept))
        for each in names:
            if names.count(each) > 1:
                raise SpecError(f"auto: the candidate '{each}' appears twice", "candidates")
        if self.within is not None:
            most = _points(self.within)
            unknown = [str(each) for each in kept if loss_of(str(each)) is None]
            if unknown:
                measured = "; ".join(f"{name} {effect:+.2f}" for name, effect in EFFECTS.items())
                raise SpecError(
                    f"auto: the effect of {' and '.join(unknown)} on the accuracy was not "
                    f"measured, so it cannot be compared with within={self.within}. Leave it or "
                    f"`within` out. Measured, in percentage points: {measured}",
                    "within",
                )
            kept = [each for each in kept if (loss_of(str(each)) or 0.0) <= most]
        if len(kept) < 2:
            raise SpecError(
                "auto: no candidate remains besides mean: name others, or raise `within`",
                "candidates" if self.within is None else "within",
            )
        return tuple(kept)


def _points(within: object) -> float:
    """Return the percentage points of a text such as "0.5%"."""
    number: object = None
    if isinstance(within, str) and within.strip().endswith("%"):
        try:
            number = float(within.strip()[:-1])
        except ValueError:
            number = None
    if not is_number(number) or number < 0:
        raise SpecError(
            f'auto: within must be a percentage such as "0.5%", not {shown(within)}', "within"
        )
    return number
