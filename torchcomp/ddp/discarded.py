"""Discarded: whether the gradients of a step were thrown away before an optimizer used them.

As in GANs and SAM. A residual would apply the unsent part later, so such a step does not count.
Unless an optimizer has stepped, the next backward pass looks whether the gradients were cleared,
just before it accumulates its first one.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchcomp.engine import host
from torchcomp.engine.averager import Averager
from torchcomp.engine.nonfinite import largest_magnitudes
from torchcomp.engine.settlement import Status

_log = logging.getLogger(__name__)


class Discarded:
    """Finds out whether the last step of an averager was thrown away, and takes it back.

    Where no optimizer is seen to step, every step counts. A rank that `speaks` logs the first one.
    """

    def __init__(self, averager: Averager, parameters: Mapping[str, Tensor], speaks: bool) -> None:
        # Whether the last step counts, and no optimizer has stepped on its gradients.
        self.open = False
        self._cleared = False  # the gradients of the last step, before an optimizer stepped on them
        self._averager = weakref.ref(averager)  # which refers to this object
        self._parameters = list(parameters.values())
        self._ids = set(map(id, self._parameters))
        # The last one that has stepped. Where it is gone, something else may update the parameters.
        self._optimizer: weakref.ref[Optimizer] | None = None
        # Whether an optimizer is in its step, and whether any parameter then has a gradient.
        self.is_stepping = self._uses = False
        self._last: tuple[object, ...] = ()  # what the averager was like after the last step
        self._hooks: list[Any] = []
        # Gradients in the last forward pass, and what waits for whether they are nonzero.
        self._fetched: tuple[list[tuple[int, int]], Callable[[], Tensor]] | None = None
        self._speaks = speaks
        averager.on_finish(self._finished)
        _listen(self)

    def look_in_backward(self) -> None:
        """In a forward pass: :meth:`look` when the backward pass computes its first gradient."""
        if self._hooks:
            return
        trained = [each for each in self._parameters if each.requires_grad]
        self._hooks = [each.register_hook(self.look) for each in trained]  # type: ignore[no-untyped-call]
        gradients = self._gradients()
        # On an accelerator, the answer is then there when the backward pass begins.
        if gradients and not host.can_read(gradients[0]):
            self._fetched = _versions(gradients), host.copy_from(_any_nonzero(gradients))

    def look(self, gradient: Tensor | None = None) -> None:
        """Look whether the gradients are cleared, before this pass accumulates any of them."""
        for hook in self._hooks:
            hook.remove()
        fetched, self._hooks, self._fetched = self._fetched, [], None
        if not self.open or self._cleared:
            return
        gradients = self._gradients()
        if gradients and fetched is not None and fetched[0] == _versions(gradients):
            self._cleared = not fetched[1]()
        else:
            self._cleared = not (gradients and _any_nonzero(gradients))

    def settle(self, *, in_backward: bool) -> None:
        """Take the last step back if it was thrown away. All ranks do so before the same step."""
        if self._hooks or not in_backward:
            self.look()
        averager = self._averager()
        if averager is None or not self.open:
            return
        try:
            if averager.undecided:
                averager.decide()
        except Exception:
            # The steps before it still count or not with the gradients.
            self._last = averager.step, averager.changes
            self.open = averager.steps_kept > 0
            raise
        skipped = averager.status is not Status.COUNTED and not averager.steps_kept
        if skipped or self._last != (averager.step, averager.changes):
            # Another one was loaded, or the step does not count for another reason.
            self.open = False
        elif self._cleared:
            averager.take_back()
            self.open = False
            if self._speaks:
                self._speaks = False
                _log.info(
                    "gradients were cleared before an optimizer stepped on them, so step %d does "
                    "not count (logged once). model.no_sync() would exchange nothing",
                    averager.step + 1,
                )
        elif in_backward:
            # The next step adds to its gradients. An optimizer uses both, or none of them.
            averager.keep_before()

    def _finished(self, counts: bool) -> None:
        averager = self._averager()
        if averager is None:
            return
        self._last = averager.step, averager.changes
        self._cleared = False
        stepped = self._optimizer is not None and self._optimizer() is not None
        # A step in the closure of an optimizer is used by it: LBFGS takes several.
        unused = stepped and not self.is_stepping
        self.open = unused and (counts or averager.steps_kept > 0)

    def _gradients(self) -> list[Tensor]:
        found = [each.grad for each in self._parameters if each.grad is not None]
        return [each.to_local() if isinstance(each, DTensor) else each for each in found]


def _versions(gradients: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(id(each), each._version) for each in gradients]


def _any_nonzero(tensors: Sequence[Tensor]) -> Tensor:
    return largest_magnitudes(tensors, tensors[0].device).ne(0).any()


# --- The optimizers of this process ---

_lock = threading.Lock()
_models: tuple["weakref.ref[Discarded]", ...] = ()
_hears_optimizers = False


def _listen(discarded: Discarded) -> None:
    global _models, _hears_optimizers
    with _lock:
        # Another tuple, because an optimizer of another thread can be reading this one.
        _models = (*[each for each in _models if each() is not None], weakref.ref(discarded))
        if not _hears_optimizers:
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)
            _hears_optimizers = True


# Not traced: the step of an optimizer can be compiled.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for discarded in _trained_by(optimizer):
        discarded.is_stepping, discarded._uses = True, False
        # One that trains several models also steps when this one's gradients were cleared.
        for each in discarded._parameters:
            if each.grad is not None:
                discarded._uses = True
                break


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for discarded in _trained_by(optimizer):
        discarded.is_stepping, discarded._optimizer = False, weakref.ref(optimizer)
        averager = discarded._averager()
        if discarded._uses and not discarded._cleared and averager is not None:
            discarded.open = False
            averager.forget_before()


def _trained_by(optimizer: Optimizer) -> set[Discarded]:
    found = set[Discarded]()
    for group in optimizer.param_groups:
        if group.get("capturable"):  # may be part of a CUDA graph, which is replayed unseen
            return set()
        for each in _models:
            model = each()
            # `isdisjoint` ends at the first parameter that they share.
            if model is not None and not model._ids.isdisjoint(map(id, group["params"])):
                found.add(model)
    return found
