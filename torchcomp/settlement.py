"""Settlement: does the last step count? One object asks this, whatever the reason to doubt it."""

import threading
from collections.abc import Callable
from enum import Enum

Reason = Callable[[], bool]
"""Returns whether the step counts, or raises what is wrong with it. It can wait for other ranks."""


class Status(Enum):
    """What is known of a step."""

    IN_FLIGHT = "in flight"  # it has not ended
    OPEN = "open"  # it has ended, and counts unless a reason says otherwise
    COUNTED = "counted"
    TAKEN_BACK = "taken back"


class Settlement:
    """Whether the last step counts.

    A step is in flight until it ends. It is then open as long as a reason can still take it back,
    such as a check whose result is on its way, or the vote of a manager. :meth:`ask` decides.

    Args:
        lock: held while the state changes.

    Attributes:
        status: what is known of the last step.
    """

    def __init__(self, lock: "threading.RLock") -> None:
        self._lock = lock
        # Held while reasons are asked, which can wait for ranks. A thread whose backward pass was
        # abandoned can still be in there.
        self._asking = threading.RLock()
        self._reasons: tuple[Reason, ...] = ()
        self.status = Status.COUNTED

    def begin(self) -> None:
        """Note that a step begins."""
        self.status, self._reasons = Status.IN_FLIGHT, ()

    def end(self, *reasons: Reason) -> None:
        """End the step in flight. It counts, unless one of the reasons says otherwise."""
        self._reasons, self.status = reasons, Status.OPEN if reasons else Status.COUNTED

    def discard(self) -> None:
        """Note that the step in flight ends without a result, or that the last one is undone."""
        self.status, self._reasons = Status.TAKEN_BACK, ()

    def ask(self, take_back: Callable[[], None]) -> None:
        """Ask all reasons, if the step is open. Take it back if it does not count.

        Args:
            take_back: undoes the last step. Called with the lock held.

        Raises:
            Exception: what a reason raises. The step is then taken back as well.
        """
        with self._asking:
            reasons, counts = self._reasons, False
            if self.status is not Status.OPEN:
                return
            try:
                counts = all(reason() for reason in reasons)
            finally:
                with self._lock:
                    # Not if another state was loaded, or the step abandoned, in the meantime.
                    if self._reasons is reasons:
                        self._reasons = ()
                        self.status = Status.COUNTED
                        if not counts:
                            take_back()
