"""LossScale: the scale of a GradScaler, without a wait in the middle of the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchcomp.ddp.one_process import OfOneProcess
from torchcomp.engine import host


class LossScale(OfOneProcess):
    """Reads the loss scale of each step from an enabled scaler.

    ``scaler.get_scale()`` waits until the device has done everything that was launched so far, in
    the thread that must launch the rest of the backward pass. Therefore :meth:`fetch` starts a copy
    to the host when a forward pass begins, and :meth:`read` waits for this copy only.
    """

    def __init__(self, scaler: "torch.amp.GradScaler") -> None:
        self._scaler = scaler
        # The scaler's tensor, its version when it was copied, and what waits for the copy.
        self._fetched: tuple[Tensor, int, Callable[[], Tensor]] | None = None

    @classmethod
    def of(
        cls, scaler: "torch.amp.GradScaler | None", model: torch.nn.Module
    ) -> "LossScale | None":
        """Return the loss scale of a model's steps; None if the loop does not scale its losses."""
        if scaler is None or not scaler.is_enabled():
            return None
        scale = cls(scaler)
        model.register_forward_pre_hook(scale.fetch)
        return scale

    # Compiled apart, because a compiled forward pass cannot start the copy.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def fetch(self, module: Any = None, args: Any = None) -> None:
        """In a forward pass: start a copy to the host, if the scale changed since the last one."""
        scale = self._scaler._get_scale_async()
        # The scaler has no tensor before the first loss. One on the CPU can be read at any time.
        if scale is None or host.can_read(scale) or self._is_fetched(scale):
            return
        self._fetched = scale, scale._version, host.copy_from(scale)

    def read(self) -> float:
        """Return the scale of the step in progress."""
        # If the loop updates the scale between a forward pass and its backward pass, the copy is
        # out of date.
        if self._fetched is None or not self._is_fetched(self._scaler._get_scale_async()):
            return float(self._scaler.get_scale())
        return float(self._fetched[2]())

    def _is_fetched(self, scale: Tensor | None) -> bool:
        # An update changes the tensor in place. The host sees only that its version changes.
        fetched, version = (None, 0) if self._fetched is None else self._fetched[:2]
        return scale is not None and fetched is scale and version == scale._version
