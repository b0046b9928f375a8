"""Trial: which method each of the first steps times, and what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from torchcomp.auto.marks import Mark, seconds_between
from torchcomp.errors import SpecError

_SETTLE = 4
"""First steps that do not count: DDP rebuilds its buckets, and libraries choose algorithms."""

_WARM_UP = 2
"""First steps of each block that do not count: they allocate the state of the method."""

_LEAST = _WARM_UP + 2
_CLOSE = 1.25
"""Only methods that take at most this many times as long as the best are timed again."""


@dataclass(frozen=True)
class Timed:
    """A step, from the end of the last one on.

    Attributes:
        before: end of the last step; None if it is not known. Only warm-up steps may lack it.
        computed: when the gradients were computed.
        averaged: when the method had averaged them, or copies of them.
        end: when the gradients were averaged.
        copying: seconds of this step in which the host made copies.
    """

    before: Mark | None
    computed: Mark
    averaged: Mark
    end: Mark
    copying: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds that the step takes with the method."""
        before = self.computed if self.before is None else self.before
        return seconds_between(before, self.averaged) - self.copying

    @property
    def alone(self) -> float:
        """Seconds of it in which the step did not wait for the method."""
        return self.seconds - max(0.0, seconds_between(self.computed, self.averaged))

    @property
    def average(self) -> float:
        """Seconds of the uncompressed average that followed."""
        return seconds_between(self.averaged, self.end)


class Trial:
    """Times methods in two rounds of blocks of consecutive steps.

    Each method has a block in the first round. The second round repeats the fast ones, so that a
    disturbance in one block decides less. All ranks see the same agreed times, and therefore go
    through the same blocks.

    Args:
        methods: number of methods. The first is ``mean``, which is in both rounds.
        steps: number of steps at most.

    Attributes:
        method: index of the method of the next step.

    Raises:
        SpecError: if there are too few steps.
    """

    def __init__(self, methods: int, steps: int) -> None:
        # Even: in some loops, short and long steps alternate.
        self._length = (steps - _SETTLE) // (4 * methods) * 2
        if self._length < _LEAST:
            raise SpecError(
                f"auto: {steps} steps are too few for {methods} methods, mean and the candidates: "
                f"at least {_SETTLE + 2 * methods * _LEAST}",
                "steps",
            )
        self._steps: list[list[Timed]] = [[] for _ in range(methods)]
        self._blocks = list(range(methods))
        self._round, self._done = 0, -_SETTLE
        self.method = 0

    def restart_block(self) -> None:
        """Begin the current block again, after a step that failed."""
        self._done = min(self._done, 0)
        # The round can have ended without the other ranks.
        self._blocks = self._blocks or [self.method]

    def add(self, step: Timed) -> bool:
        """Record a step.

        Returns:
            Whether the round has ended: all ranks then call :meth:`end_round`.
        """
        if self._done >= _WARM_UP:
            self._steps[self.method].append(step)
        self._done += 1
        if self._done < self._length:
            return False
        self._done = 0
        self._blocks.pop(0)
        if self._blocks:
            self.method = self._blocks[0]
        return not self._blocks

    def measured(self) -> list[int]:
        """Return this rank's nanoseconds: of each method's step, alone, and of an average.

        On CUDA, the host waits for the device.
        """
        steps = [median(step.seconds for step in block) for block in self._steps]
        alone = min(median(step.alone for step in block) for block in self._steps)
        # Besides mean, whose average is not apart.
        average = median(step.average for block in self._steps[1:] for step in block)
        return [round(1e9 * number) for number in (*steps, alone, average)]

    def end_round(self, agreed: Sequence[int]) -> bool:
        """End a round; the maxima of :meth:`measured` over the ranks decide on the next one.

        Returns:
            Whether the trial has ended.
        """
        if self._round == 1:
            return True
        self._round = 1
        *steps, _, _ = agreed
        most = _CLOSE * min(steps)
        self._blocks = [i for i, each in enumerate(steps) if i == 0 or each <= most]
        self.method = self._blocks[0]
        return False
