"""Kernels in Triton that write the frames to send, and read frames as they were received.

Vectors in a dtype that Triton's kernels do not support, such as float64, run in plain torch.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchcomp.kernels import elementwise_triton, sparse_triton
from torchcomp.kernels.elementwise_triton import ElementwiseTriton
from torchcomp.kernels.quantize import Quantizer
from torchcomp.kernels.segments import Prepared
from torchcomp.kernels.sparse import Sparse
from torchcomp.kernels.sparse_triton import SparseTriton
from torchcomp.routes.wire import Frames, Parts


class _InFrames:
    """Kernels that read frames where they arrived."""

    reads_frames = True
    form: Any
    """The module with Triton's kernels."""
    _made: Any = None
    vectors: Prepared
    accumulate: Any

    def mean_of(self, received: Tensor, out: Tensor, divisor: int) -> None:
        """Write the sum of received messages, in order, divided by `divisor`, to `out`."""
        kernels = self._for(out)
        if kernels is None:
            self.accumulate(self._frames.unpack(received), out.zero_())
            out.div_(divisor)
        else:
            kernels.mean(received, out, divisor)

    @property
    def _frames(self) -> Frames:
        if self.vectors.frames is None:
            raise ValueError("vectors without frames: decode messages of their codec instead")
        return self.vectors.frames

    def _for(self, *tensors: Tensor) -> Any:
        """Return Triton's kernels, or None if they do not support these tensors."""
        form, vectors, numel = self.form, self.vectors, tensors[0].numel()
        for x in tensors:
            if x.dtype not in form.DTYPES or not x.is_contiguous():
                return None
        if numel >= form.LIMIT or vectors.dtype not in form.DTYPES:
            return None
        if self._made is None:
            offsets = None if vectors.frames is None else vectors.frames.offsets
            self._made = self._make(numel, vectors.dtype, vectors.device, offsets)
        return self._made

    @abstractmethod
    def _make(self, numel: int, *place: Any) -> Any:
        """Prepare Triton's kernels for a dtype, a device and the places of fields in frames."""


class SparseFrames(_InFrames, Sparse):
    """The kernels of sparse messages; see :class:`.sparse.Sparse`."""

    form = sparse_triton

    def _make(self, numel: int, *place: Any) -> SparseTriton:
        return SparseTriton(self.segments, numel, self.fmt, *place)

    def select(self, x: Tensor) -> Tensor:
        kernels = self._for(x)
        if kernels is None:
            return super().select(x)
        return kernels.select(x.detach())  # type: ignore[no-any-return]

    def add_and_select(self, g: Tensor, e: Tensor, out: Tensor) -> Tensor:
        kernels = self._for(g, e, out)
        if kernels is None:
            return super().add_and_select(g, e, out)
        found: Tensor = kernels.add_and_select(g.detach(), e.detach(), out.detach())
        return found

    def encode(self, x: Tensor, index: Tensor, noise: Tensor | None) -> Sequence[Parts]:
        frames, kernels = self.vectors.frames, self._for(x)
        if frames is None or kernels is None:
            return super().encode(x, index, noise)
        kernels.encode(x, index, frames.outgoing(), noise)
        return frames.placed

    def encode_sum(
        self, g: Tensor, e: Tensor, rest: Tensor, noise: Tensor | None
    ) -> tuple[Sequence[Parts], Tensor]:
        frames, kernels = self.vectors.frames, self._for(g, e, rest)
        if frames is None or kernels is None:
            return super().encode_sum(g, e, rest, noise)
        return frames.placed, kernels.encode_sum(g, e, rest, frames.outgoing(), noise)

    def subtract(
        self, index: Tensor, parts: Sequence[Parts], x: Tensor, weight: float = 1.0
    ) -> None:
        frames, kernels = self.vectors.frames, self._for(x)
        if frames is None or parts is not frames.placed:
            super().subtract(index, parts, x, weight)
        elif kernels is None:
            # What is placed can be the bytes of a field that is not aligned.
            super().subtract(index, frames.unpack(frames.outgoing())[0], x, weight)
        else:
            kernels.subtract(frames.outgoing(), index, x, weight)


class QuantizedFrames(_InFrames, Quantizer):
    """The kernels of quantized messages; see :class:`.quantize.Quantizer`."""

    form = elementwise_triton

    def _make(self, numel: int, *place: Any) -> ElementwiseTriton:
        return ElementwiseTriton(self.vectors.segments, self.fmt, *place)

    def encode_sum(
        self, g: Tensor, e: Tensor, rest: Tensor, noise: Tensor | None
    ) -> Sequence[Parts]:
        frames, kernels = self.vectors.frames, self._for(g, e, rest)
        if frames is None or kernels is None:
            return super().encode_sum(g, e, rest, noise)
        kernels.encode_sum(g, e, rest, frames.outgoing(), noise)
        return frames.placed

    def encode(self, x: Tensor, noise: Tensor | None) -> Sequence[Parts]:
        frames, kernels = self.vectors.frames, self._for(x)
        if frames is None or kernels is None:
            return super().encode(x, noise)
        kernels.encode(x, frames.outgoing(), noise)
        return frames.placed

    def subtract(self, parts: Sequence[Parts], x: Tensor, weight: float) -> None:
        frames, kernels = self.vectors.frames, self._for(x)
        if frames is None or parts is not frames.placed:
            super().subtract(parts, x, weight)
        elif kernels is None:
            super().subtract(frames.unpack(frames.outgoing())[0], x, weight)
        else:
            kernels.subtract(frames.outgoing(), x, weight)


def applies(vectors: Prepared) -> bool:
    """Whether each vector begins after the end of the one before, as these kernels require."""
    end = 0
    for start, n, _ in vectors.segments:
        if start < end:
            return False
        end = start + n
    return True
