"""Pace: notice that steps take much longer, or much less time, than before."""

from collections.abc import Sequence
from statistics import median

from torchcomp.auto.trial import Timed

WINDOW = 50
"""Number of steps whose median is compared."""

_LONGER, _SHORTER = 1.5, 0.5


class Pace:
    """The step time since a method was chosen.

    Attributes:
        reference: nanoseconds of a step in the first window, agreed by the ranks; None before.
    """

    def __init__(self, reference: int | None = None) -> None:
        self.reference = reference
        self._steps: list[Timed] = []

    def add(self, step: Timed) -> None:
        """Record a step."""
        self._steps.append(step)

    @property
    def full(self) -> bool:
        """Whether a window has ended."""
        return len(self._steps) >= WINDOW

    def take(self) -> int:
        """Return the median step of the window in nanoseconds, and begin another one.

        On CUDA, the host waits for the last of its steps.
        """
        steps, self._steps = self._steps, []
        return round(1e9 * median(step.seconds for step in steps))

    def flags(self) -> list[bool]:
        """Return what this rank tells the others of a window that has ended; else nothing."""
        if self.reference is None or not self.full:
            return []
        nanoseconds = self.take()
        return [nanoseconds > _LONGER * self.reference, nanoseconds > _SHORTER * self.reference]

    @staticmethod
    def changed(any_flags: Sequence[int]) -> bool:
        """Whether the step time has changed by half, on the slowest rank.

        Args:
            any_flags: whether any rank has each of the :meth:`flags`.
        """
        longer, not_shorter = any_flags
        return bool(longer) or not not_shorter
