"""TopK: keep the k entries of largest magnitude."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.component import Choices
from torchcomp.compressors.base import Encoded, Received, Vector
from torchcomp.compressors.sparse import Selector, segments_of
from torchcomp.draws import drawn
from torchcomp.errors import SpecError
from torchcomp.kernels import elias_fano, entries, quantize, select
from torchcomp.kernels.segments import Segment, joined, split
from torchcomp.kernels.select import Scratch
from torchcomp.keys import Key, uniform
from torchcomp.wire import Field, Layout, Parts


@dataclass(frozen=True)
class TopK(Selector):
    """``topk(0.01)``: keep the entries of largest magnitude.

    Contractive with alpha = k/n. Among equal magnitudes the lowest index wins: the result is the
    same on every machine. NaN and infinities rank above every number. Indices are sent as an
    Elias-Fano code. Reference: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS
    2018.

    Attributes:
        values: format of the values sent, by default the gradient's dtype. "int8" and "int4" have
            one scale per 128 values. With a format, the rounding error lowers alpha.
        rounding: of "int8" and "int4"; "stochastic" is unbiased.
    """

    name: ClassVar[str] = "topk"
    example: ClassVar[str] = "topk(0.01)"

    values: Annotated[str | None, Choices(quantize.FORMATS)] = None
    rounding: Annotated[str, Choices(quantize.ROUNDINGS)] = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding == "stochastic" and self.values not in quantize.LEVELS:
            raise SpecError(
                f'topk: rounding="stochastic" needs values="int8" or values="int4", not '
                f"values={self.values!r}, because only these have evenly spaced levels",
                "rounding",
            )

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        k = self.kept(numel)
        index = Field("index", torch.uint8, elias_fano.nbytes(numel, k))
        return (*quantize.layout(self.values, k, dtype), index)

    def select(self, x: Tensor, segments: Sequence[Segment], scratch: Sequence[Scratch]) -> Tensor:
        return select.largest_all(x, segments, scratch)

    def select_sum(
        self,
        g: Tensor,
        e: Tensor,
        out: Tensor,
        segments: Sequence[Segment],
        scratch: Sequence[Scratch],
    ) -> Tensor:
        return select.add_and_select_all(g, e, out, segments, scratch)

    def encode_selected(
        self, x: Tensor, segments: Sequence[Segment], index: Tensor, keys: Iterable[Key]
    ) -> list[Encoded]:
        counts = [segment.k for segment in segments]
        noise: Sequence[Tensor | None] = [None] * len(counts)
        if self.rounding == "stochastic":
            # Independent on each rank: the rounding errors average out in the mean.
            draws = zip(keys, counts, strict=True)
            noise = [drawn(uniform, key, count, like=x) for key, count in draws]
        if not host.can_read(x):
            return self._encode_together(x, segments, index, noise)
        message = []
        for segment, chosen, own in zip(segments, split(index, counts), noise, strict=True):
            local = chosen - segment.start if segment.start else chosen
            # First, because it checks the indices. The Numba quantizer reads x[index] unchecked.
            code = elias_fano.encode(local, segment.n)
            message.append(Encoded((*quantize.encode(x, self.values, own, chosen), code), chosen))
        return message

    def _encode_together(
        self,
        x: Tensor,
        segments: Sequence[Segment],
        index: Tensor,
        noise: Sequence[Tensor | None],
    ) -> list[Encoded]:
        counts = [segment.k for segment in segments]
        together = [own for own in noise if own is not None]
        values = quantize.encode_all(
            x.index_select(0, index), counts, self.values, joined(together) if together else None
        )
        codes = elias_fano.encode_all(index, segments)
        each = zip(values, codes, split(index, counts), strict=True)
        return [Encoded((*fields, code), chosen) for fields, code, chosen in each]

    def round_trips(self, rows: Tensor, keys: Sequence[Key]) -> Tensor:
        if self.values is not None:  # the values are rounded
            return super().round_trips(rows, keys)
        out = torch.zeros_like(rows)
        for row, decoded in zip(rows, out, strict=True):
            index = self.select(row, self._whole(row), ())
            decoded[index] = row[index]
        return out

    def subtract(self, encoded: Encoded, x: Tensor, key: Key, weight: float = 1.0) -> None:
        if encoded.index is None:  # decode the indices from the message
            super().subtract(encoded, x, key, weight)
        else:
            entries.subtract(x, encoded.index, encoded.parts[:-1], weight)

    @classmethod
    def subtract_all(
        cls,
        vectors: Sequence[Vector],
        message: Sequence[Encoded],
        x: Tensor,
        key: Key,
        weight: float,
    ) -> None:
        index = [encoded.index for encoded in message if encoded.index is not None]
        if len(index) < len(vectors):
            super().subtract_all(vectors, message, x, key, weight)
            return
        fields = [encoded.parts[:-1] for encoded in message]
        if host.can_read(x):
            for at, own in zip(index, fields, strict=True):
                entries.subtract(x, at, own, weight)
        else:
            counts = [at.numel() for at in index]
            entries.subtract_all(x, joined(index), fields, counts, weight)

    def accumulate(
        self, messages: Sequence[Parts], out: Tensor, key: Key, weight: float = 1.0
    ) -> None:
        entries.accumulate(messages, self.kept(out.numel()), out, weight)

    @classmethod
    def accumulate_all(
        cls, messages: Sequence[Received], out: Tensor, key: Key, weight: float
    ) -> None:
        if host.can_read(out):
            super().accumulate_all(messages, out, key, weight)
            return
        together = [(segments_of(vectors), parts) for vectors, parts in messages]
        entries.accumulate_all(together, out, weight)

    def alpha(self, numel: int) -> float:
        if not numel:  # nothing is lost of an empty vector
            return 1.0
        # y are the entries that are sent, with |y|^2 >= (k/n) |x|^2. |C(x) - x|^2 is |x|^2 - |y|^2
        # for the others, plus at most delta |y|^2 for the rounding of y.
        k = self.kept(numel)
        return k / numel * (1.0 - quantize.error_bound(self.values, k))

    def omega(self, numel: int) -> None:
        return None
