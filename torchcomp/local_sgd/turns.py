"""Turns: a step of the run is one turn of every optimizer, taken or skipped by a GradScaler."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchcomp.errors import ScheduleError


class Turns:
    """Counts the turns of the optimizers of one model.

    The optimizers are held weakly, because their hooks own what owns this.

    Attributes:
        scaling: whether a turn of ``scaler.step`` is in progress, which may step the optimizer.
        foreign: whether torch.distributed.checkpoint makes the step, which is no turn then.
        evaluating: whether a closure is evaluated, an optimizer's own or a micro-batch that may
            be computed again.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._taken: set[int] = set()
        self.scaling = False
        self.foreign = False
        self.evaluating = False

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        alive = (held() for held in self._optimizers)
        return (optimizer for optimizer in alive if optimizer is not None)

    def __contains__(self, optimizer: object) -> bool:
        return any(optimizer is held() for held in self._optimizers)

    @property
    def between(self) -> bool:
        """Whether some optimizers, but not all, have had their turn of the step."""
        return bool(self._taken)

    def cleared(self) -> bool:
        """Whether the optimizers hold no gradient."""
        groups = (group for optimizer in self for group in optimizer.param_groups)
        return all(parameter.grad is None for group in groups for parameter in group["params"])

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """A closure is evaluated."""
        self.evaluating = True
        try:
            yield
        finally:
            self.evaluating = False

    def evaluated(self, argument: Any) -> Any:
        """An argument of ``optimizer.step``; of a closure, one that says when it is evaluated."""
        if not callable(argument):
            return argument

        def closure() -> Any:
            with self.evaluation():
                return argument()

        return closure

    def begin(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer's turn begins; whether it is the first of the step.

        Raises:
            ScheduleError: if it has had its turn of this step.
        """
        place = self._place(optimizer)
        if place in self._taken:
            waiting = sorted(set(range(len(self._optimizers))) - self._taken)
            raise ScheduleError(
                f"optimizer {place} begins another step, and optimizer {waiting[0]} has not had "
                "its turn of this one: a step of local steps is one turn of every optimizer that "
                "LocalSGD was given, in any order"
            )
        return not self._taken

    def end(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer's turn ends; whether it was the last of the step."""
        self._taken.add(self._place(optimizer))
        if len(self._taken) < len(self._optimizers):
            return False
        self._taken.clear()
        return True

    def _place(self, optimizer: torch.optim.Optimizer) -> int:
        return next(i for i, held in enumerate(self._optimizers) if held() is optimizer)
