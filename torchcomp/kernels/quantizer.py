"""Kernels of quantized messages of all values of a tensor: encode, subtract and add them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcomp.kernels import backend, quantize
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.segments import TOGETHER, Prepared, batches, joined, part
from torchcomp.routes.wire import Parts


def quantizer_for(vectors: Prepared, fmt: str) -> "Quantizer":
    """Return the fastest kernels for the vectors of a tensor."""
    if backend.device_form("elementwise", torch.empty(0, device=vectors.device)):
        from torchcomp.kernels import frames_triton  # it imports Triton

        if frames_triton.applies(vectors):
            return frames_triton.QuantizedFrames(vectors, fmt)
    return Quantizer(vectors, fmt)


class Quantizer:
    """The kernels in plain torch or, on a CPU, in Numba."""

    reads_frames = False

    def __init__(self, vectors: Prepared, fmt: str) -> None:
        self.vectors, self.fmt = vectors, fmt
        self._counts = [segment.n for segment in vectors.segments]
        form = backend.host_form("quantize", torch.empty(0, device=vectors.device)) or quantize
        self._encode, self._decode = form.encode, form.decode

    def encode(self, x: Tensor, noise: Tensor | None) -> Sequence[Parts]:
        """Return the fields of each vector of `x`."""
        values = joined([part(x, segment) for segment in self.vectors.segments])
        parts: Sequence[Parts] = self._encode(values, self._counts, self.fmt, noise)
        return parts

    def encode_sum(
        self, g: Tensor, e: Tensor, rest: Tensor, noise: Tensor | None
    ) -> Sequence[Parts]:
        """Encode ``g + e``, and write to `rest` what the message does not contain."""
        torch.add(g, e, out=rest)
        parts = self.encode(narrow(rest, self.vectors.dtype), noise)
        self.subtract(parts, rest, 1.0)
        return parts

    def subtract(self, parts: Sequence[Parts], x: Tensor, weight: float) -> None:
        """Subtract `weight` times the decoded message from `x`."""
        self.accumulate((parts,), x, -weight)

    def accumulate(
        self, messages: Sequence[Sequence[Parts]], out: Tensor, weight: float = 1.0
    ) -> None:
        segments = [segment for _ in messages for segment in self.vectors.segments]
        parts = [own for message in messages for own in message]
        counts = self._counts * len(messages)
        # As many at once as memory allows: each launch on an accelerator delays the backward pass.
        for run in batches(counts, TOGETHER):
            decoded = self._decode(parts[run], counts[run], out.dtype)
            for segment, values in zip(segments[run], decoded, strict=True):
                part(out, segment).add_(values, alpha=weight)
