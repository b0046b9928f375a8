"""Kernels in Triton that write the frames to send, and read frames as they were received."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchcomp.kernels.fields_triton import TYPES
from torchcomp.kernels.segments import Prepared
from torchcomp.routes.wire import Parts

# Offsets are 32-bit, also those of bits in an index code.
LIMIT = 2**30
"""A vector must have fewer elements."""

DTYPES = tuple(TYPES)
"""Supported dtypes of vectors and values. Others, such as float64, run in plain torch."""


class InFrames:
    """What kernels of sparse messages, and of messages of all elements, have in common."""

    reads_frames = True
    vectors: Prepared
    accumulate: Any
    _prepared = False

    def mean_of(self, received: Tensor, out: Tensor, divisor: int) -> None:
        """Write the sum of received messages, in order, divided by `divisor`, to `out`."""
        if self._ready(out):
            self._mean(received, received.stride(0) if len(received) > 1 else 0, out, divisor)
        else:
            assert self.vectors.frames is not None
            self.accumulate(self.vectors.frames.unpack(received), out.zero_())
            out.div_(divisor)

    def _ready(self, *tensors: Tensor) -> bool:
        """Prepare the kernels, and return whether they support these tensors."""
        for x in tensors:
            if x.dtype not in DTYPES or not x.is_contiguous() or x.numel() >= LIMIT:
                return False
        if not self._prepared:
            if self.vectors.dtype not in DTYPES:
                return False
            self._prepare(tensors[0].numel())
            self._prepared = True
        return True

    def _written(self, parts: Sequence[Parts]) -> bool:
        """Return whether kernels have written a message to the frames."""
        return self.vectors.frames is not None and parts is self.vectors.frames.placed

    @abstractmethod
    def _prepare(self, numel: int) -> None:
        """Prepare what is the same in every step, for vectors of so many elements."""

    @abstractmethod
    def _mean(self, received: Tensor, stride: int, out: Tensor, divisor: int) -> None:
        """Do as :meth:`mean_of`, with kernels. `stride` is the distance of messages in bytes."""
