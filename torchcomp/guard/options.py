"""Guard: the options of the guard."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchcomp.checks import check_count
from torchcomp.errors import SpecError
from torchcomp.guard.alarms import Alarm


@dataclass(frozen=True, kw_only=True)
class Guard:
    """When :func:`torchcomp.register` checks what it applies, and whom it tells.

    Every `every` steps, the ranks compare the mean that the method applies with the dense mean of
    the same gradients, and the parameters of the replicas with each other. docs/guard.md explains
    what is measured and when there is an alarm.

    Attributes:
        every: number of steps from one comparison to the next.
        age: number of steps after which a value that waits in the residual counts as old.
        callback: called on every rank with each new :class:`Alarm`. By default, rank 0 logs it as a
            warning.
    """

    every: int = 50
    age: int = 50
    # Each rank has its own, so ranks are compared without it.
    callback: Callable[[Alarm], object] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_count("every", self.every, owner="Guard")
        check_count("age", self.age, owner="Guard")
        if self.callback is not None and not callable(self.callback):
            raise SpecError(
                f"Guard: callback must be a function of one alarm, not {self.callback!r}",
                "callback",
            )

    @classmethod
    def of(cls, value: Any) -> "Guard | None":
        """Return the guard that an argument stands for: True, False, None or a Guard.

        Raises:
            SpecError: if it is something else.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, bool) or value is None:
            return cls() if value else None
        raise SpecError(f"guard must be True, False or a torchcomp.Guard, not {value!r}", "guard")
