"""Auto: the options of ``register(model, "auto")``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchcomp.aggregators import Aggregator, Mean
from torchcomp.specs.checks import check_count, shown
from torchcomp.specs.component import Component
from torchcomp.specs.errors import SpecError

MEAN = Mean()
SETTLE = 4  # first steps, after which no candidate is timed: DDP rebuilds its buckets
BLOCK = 4  # consecutive steps for a candidate: one is timed itself, the others its exchange

_DEFAULT = (
    'cast("bf16")',
    'bidirectional(quantize("int8"), quantize("int8"))',
    'bidirectional(quantize("int4"), quantize("int4"))',
)


@dataclass(frozen=True)
class Auto(Component):
    """``auto``: time candidates in the first steps, and go on with the best one.

    Attributes:
        candidates: methods to choose from, in a list, the one that you like most first. ``mean``,
            what plain DDP does, always comes before them.
        steps: number of steps at most after which candidates are timed.
    """

    name: ClassVar[str] = "auto"
    kind: ClassVar[str] = "choice"
    positional: ClassVar[int] = 0
    example: ClassVar[str] = "auto(steps=60)"

    candidates: tuple[str | Component, ...] = _DEFAULT
    steps: int = 100

    def __post_init__(self) -> None:
        given: object = self.candidates
        if isinstance(given, str) or not isinstance(given, Sequence):
            problem = f'must be a list such as ["ef(topk(0.01))"], not {shown(given)}'
            raise SpecError(f"auto: candidates {problem}", "candidates")
        object.__setattr__(self, "candidates", tuple(given))  # components are hashed
        check_count("steps", self.steps, owner=self.name)

    def methods(self, candidates: Sequence[Aggregator]) -> tuple[Aggregator, ...]:
        """Return the methods to time: ``mean``, and the candidates, as built."""
        methods = [MEAN, *(each for each in candidates if each != MEAN)]
        names = list(map(str, methods))  # a choice is printed and saved as text
        if len(names) == 1:
            raise SpecError("auto: no candidate besides mean: name one", "candidates")
        if len(set(names)) < len(names):
            raise SpecError(f"auto: a candidate appears twice: {', '.join(names)}", "candidates")
        least = SETTLE + BLOCK * len(names)
        if self.steps < least:
            problem = f"auto: {self.steps} steps are too few for mean and {len(names) - 1} others"
            raise SpecError(f"{problem}: at least {least}", "steps")
        return tuple(methods)
