"""Kernels in Triton that write the frames to send, and read frames as they were received.

Nothing is packed or unpacked: a message is written where it is sent from, and all ranks' messages
are decoded where they arrived. Vectors in a dtype that Triton's kernels do not support, such as
float64, run in plain torch.
"""

from collections.abc import Sequence

from torch import Tensor

from torchcomp.kernels import elementwise_triton, sparse_triton
from torchcomp.kernels.elementwise_triton import ElementwiseTriton
from torchcomp.kernels.quantizer import Quantizer
from torchcomp.kernels.sparse import Sparse
from torchcomp.kernels.sparse_triton import SparseTriton
from torchcomp.kernels.vectors import Prepared
from torchcomp.wire import Parts


class SparseFrames(Sparse):
    """The kernels of sparse messages; see :class:`.sparse.Sparse`."""

    reads_frames = True
    _made: SparseTriton | None = None

    def select(self, x: Tensor) -> Tensor:
        kernels = self._for(x)
        return super().select(x) if kernels is None else kernels.select(x.detach())

    def add_and_select(self, g: Tensor, e: Tensor, out: Tensor) -> Tensor:
        kernels = self._for(g, e, out)
        if kernels is None:
            return super().add_and_select(g, e, out)
        return kernels.add_and_select(g.detach(), e.detach(), out.detach())

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

    def mean_of(self, received: Tensor, out: Tensor, divisor: int) -> None:
        """Write the sum of received messages, in order, divided by `divisor`, to `out`.

        Args:
            received: (count, nbytes) uint8, the frames of each message.
            out: 1-D.
            divisor: at least 1.
        """
        frames, kernels = self.vectors.frames, self._for(out)
        if kernels is not None:
            kernels.mean(received, out, divisor)
        elif frames is not None:
            self.mean(frames.unpack(received), out, divisor)

    def _for(self, *tensors: Tensor) -> SparseTriton | None:
        """Return Triton's kernels, or None if they do not support these tensors."""
        numel = tensors[0].numel()
        for x in tensors:
            if x.dtype not in sparse_triton.DTYPES or not x.is_contiguous():
                return None
        if numel >= sparse_triton.LIMIT or self.vectors.dtype not in sparse_triton.DTYPES:
            return None
        if self._made is None:
            frames = self.vectors.frames
            self._made = SparseTriton(
                self.segments,
                numel,
                self.fmt,
                self.vectors.dtype,
                self.vectors.device,
                None if frames is None else frames.offsets,
            )
        return self._made


class QuantizedFrames(Quantizer):
    """The kernels of quantized messages; see :class:`.quantize.Quantizer`."""

    reads_frames = True
    _made: ElementwiseTriton | None = None

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

    def mean_of(self, received: Tensor, out: Tensor, divisor: int) -> None:
        """Write the mean of received messages to `out`; see :meth:`SparseFrames.mean_of`."""
        frames, kernels = self.vectors.frames, self._for(out)
        if kernels is not None:
            kernels.mean(received, out, divisor)
        elif frames is not None:
            self.accumulate(frames.unpack(received), out.zero_())
            out.div_(divisor)

    def _for(self, *tensors: Tensor) -> ElementwiseTriton | None:
        """Return Triton's kernels, or None if they do not support these tensors."""
        for x in tensors:
            if x.dtype not in elementwise_triton.DTYPES or not x.is_contiguous():
                return None
        supported = self.vectors.dtype in elementwise_triton.DTYPES
        if tensors[0].numel() >= elementwise_triton.LIMIT or not supported:
            return None
        if self._made is None:
            frames, vectors = self.vectors.frames, self.vectors
            self._made = ElementwiseTriton(
                vectors.segments,
                self.fmt,
                vectors.dtype,
                vectors.device,
                None if frames is None else frames.offsets,
            )
        return self._made


def applies(vectors: Prepared) -> bool:
    """Whether each vector begins after the end of the one before, as these kernels require."""
    end = 0
    for start, n, _ in vectors.segments:
        if start < end:
            return False
        end = start + n
    return True
