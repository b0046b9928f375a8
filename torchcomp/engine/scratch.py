"""Scratch: memory that one thread or stream uses for one large tensor after another.

Fresh memory is expensive on the CPU. The allocator returns large tensors to the system, and each
page that comes back is filled with zeros first: for 45 MB, that takes longer than the copy into it.
"""

import torch
from torch import Tensor


class Scratch:
    """Memory for one tensor at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a 1-D tensor with values that are not set. Do not use the last one any more."""
        nbytes = numel * dtype.itemsize
        if self._memory.numel() < nbytes or self._memory.device != device:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._memory[:nbytes].view(dtype)
