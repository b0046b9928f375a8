"""Host: values of a device without a wait for them, and memory without a new allocation."""

from collections.abc import Callable

import torch
from torch import Tensor


def can_read(x: Tensor) -> bool:
    """Whether the host can read `x` without a wait. If not, do not branch on a value."""
    # Tests replace this function to run the forms for accelerators on tensors of the CPU.
    return x.is_cpu


def copy_to(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to a device, without waiting for the device."""
    if device.type != "cuda":
        return values.to(device)
    # A copy from pageable memory waits for the stream. Memory that is pinned stays reserved until
    # the copy has read it.
    return values.pin_memory().to(device, non_blocking=True)


def copy_from(values: Tensor) -> Callable[[], Tensor]:
    """Start a copy to the CPU. The result waits for this copy alone, and returns it."""
    if values.device.type != "cuda":
        return lambda: values
    copy = values.to("cpu", non_blocking=True, copy=True)  # to pinned memory
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(values.device))

    def wait() -> Tensor:
        copied.synchronize()
        return copy

    return wait


def keep_for_this_stream(values: Tensor) -> None:
    """Do not use the memory of `values` again before the current stream has used them."""
    if values.is_cuda:
        values.record_stream(torch.cuda.current_stream(values.device))


class Scratch:
    """Memory that one thread or stream uses for one large tensor after another."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a 1-D tensor with values that are not set. Do not use the last one any more."""
        # The CPU's allocator returns large tensors to the system, and each page that comes back is
        # filled with zeros first: for 45 MB, that takes longer than the copy into it.
        nbytes = numel * dtype.itemsize
        if self._memory.numel() < nbytes or self._memory.device != device:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._memory[:nbytes].view(dtype)
