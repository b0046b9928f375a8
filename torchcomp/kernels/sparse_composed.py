"""Kernels of sparse messages, composed of the kernels in Triton for selection, codes and entries.

A stand-in until one class has all of them.
"""

from collections.abc import Sequence
from itertools import islice
from types import ModuleType

import torch
from torch import Tensor

from torchcomp.kernels import (
    elias_fano,
    elias_fano_triton,
    entries_triton,
    quantize,
    quantize_triton,
    select_triton,
    sparse,
)
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.segments import TOGETHER, batches, joined, rows, runs, split
from torchcomp.kernels.select import Scratch
from torchcomp.wire import Parts


class SparseComposed(sparse.Sparse):
    """See :class:`torchcomp.kernels.sparse.Sparse`."""

    def __init__(self, vectors: sparse.Prepared, fmt: str | None) -> None:
        super().__init__(vectors, fmt)
        self._scratch = Scratch()

    def select(self, x: Tensor) -> Tensor:
        if not _fits(select_triton, x):
            return super().select(x)
        x = x.detach().contiguous()
        return select_triton.select_all(x, self.segments, self._scratch, None)

    def add_and_select(self, g: Tensor, e: Tensor, out: Tensor) -> Tensor:
        contiguous = g.is_contiguous() and e.is_contiguous() and out.is_contiguous()
        # The form leaves out segments of which nothing is selected.
        if not (_fits(select_triton, out) and contiguous and all(self.counts)) or (
            (g.dtype, e.dtype, out.dtype) not in select_triton.SUMS
        ):
            return super().add_and_select(g, e, out)
        summands = g.detach(), e.detach()
        return select_triton.select_all(out.detach(), self.segments, self._scratch, summands)

    def encode(self, x: Tensor, index: Tensor, noise: Tensor | None) -> list[Parts]:
        values = narrow(x.index_select(0, index), self.vectors.dtype)
        fields = quantize.encode(values, self.counts, self.fmt, noise, quantize_triton)
        codes = elias_fano.encode(index, self.segments, elias_fano_triton)
        return [(*own, code) for own, code in zip(fields, codes, strict=True)]

    def subtract(
        self, index: Tensor, parts: Sequence[Parts], x: Tensor, weight: float = 1.0
    ) -> None:
        if not _fits(entries_triton, x):
            super().subtract(index, parts, x, weight)
            return
        fields = [own[:-1] for own in parts]
        values = quantize.decode(fields, self.counts, x.dtype, quantize_triton)
        entries_triton.subtract(x, index, joined(values), weight)

    def accumulate(
        self, messages: Sequence[Sequence[Parts]], out: Tensor, weight: float = 1.0
    ) -> None:
        cuts = runs(self.segments)
        each = [(self.segments[cut], message[cut]) for message in messages for cut in cuts]
        sizes = [sum(segment.k for segment in some) for some, _ in each]
        for batch in batches(sizes, TOGETHER):
            every = [segment for some, _ in each[batch] for segment in some]
            parts = [own for _, message in each[batch] for own in message]
            counts = [segment.k for segment in every]
            fields = [own[:-1] for own in parts]
            values = quantize.decode(fields, counts, out.dtype, quantize_triton)
            codes = [code for *_, code in parts]
            index, damaged = elias_fano.decode(codes, every, elias_fano_triton)
            if _fits(entries_triton, out) and len(set(sizes[batch])) == 1:
                count = len(each[batch])
                alone = len(values) == count
                matrix = rows(values) if alone else joined(values).view(count, -1)
                entries_triton.accumulate(out, index.view(matrix.shape), matrix, damaged, weight)
                continue
            rest = iter(values)
            for at, (some, _) in zip(split(index, sizes[batch]), each[batch], strict=True):
                out.index_add_(0, at, joined(list(islice(rest, len(some)))), alpha=weight)
            out[:1].masked_fill_(damaged, torch.nan)


def _fits(form: ModuleType, x: Tensor) -> bool:
    return x.dtype in form.DTYPES and x.numel() < form.LIMIT and x.is_contiguous()
