"""Sparse messages of the segments of a vector in Triton, for CUDA; prepared once.

The number of launches does not grow with the number of segments or messages: 8 select, encode and
subtract, and 3 decode and average the messages of all ranks. Shapes are static, the host never
waits, and nothing is copied to the device after the preparation. Results equal those of plain torch
bit for bit. The kernels are in :mod:`.selection_triton`, :mod:`.coding_triton`,
:mod:`.decoding_triton` and :mod:`.adding_triton`.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import ceil
from typing import Any

import torch
import triton
from torch import Tensor

from torchcomp import host
from torchcomp.kernels import adding_triton as adding
from torchcomp.kernels import coding_triton as coding
from torchcomp.kernels import decoding_triton as decoding
from torchcomp.kernels import selection_triton as selection
from torchcomp.kernels.elias_fano import nbytes
from torchcomp.kernels.fields_triton import TYPES, Format, Headers, aligned
from torchcomp.kernels.launch import Launch
from torchcomp.kernels.quantize import largest_scale
from torchcomp.kernels.segments import Segment
from torchcomp.kernels.table_triton import covering, placed

_BLOCK = 4096
"""Elements of the vector per program that collects candidates."""

_COUNTED = 2048
"""Candidates per program that counts digits."""

_CHUNK = 256
"""Numbers that a program reads at once, of a list whose length only the device knows."""

_GROUPED = 64
"""Blocks whose counts are also added up. With b blocks, a program reads b / 64 + 64 counts."""

_SAMPLE = 16384

# Four rounds of 8 bits. Histograms with more bins are slow before Triton 3.7.
_ROUNDS, _BINS = 4, 256

_MARGIN = 1 << 20
"""First margin below the last threshold, in units of float32's last place: 6 to 12 %."""

_ROWS = 4
"""Blocks of 128 values per program that encodes them."""

_BYTES = 256
"""Bytes of the high part of an index code per program that decodes them."""

_DECODED = 512
"""Entries that a program decodes at once. Not fewer than its threads: each reads what it writes."""

_TILE = 4096
"""Elements of the vector that a program adds to: 16 KiB of float32."""

_PART = 512
"""Elements that a program zeroes or divides at once."""

# Offsets are 32-bit, also those of bits in an index code.
LIMIT = 2**30
"""A vector must have fewer elements."""

DTYPES = tuple(TYPES)
"""Supported dtypes of vectors and values."""


class SparseTriton:
    """Sparse messages of the segments of a vector. Workspaces are for one stream at a time.

    A message is a run of bytes, 1-D uint8, that begins at a multiple of 4 bytes. It has the fields
    of each segment: its values, then the code of its indices.

    Args:
        segments: disjoint parts of the vector, in ascending order.
        numel: number of elements of the vector, below LIMIT.
        fmt: format of the values; see :mod:`.quantize`. None sends values of `dtype`.
        dtype: values are first rounded to this one of DTYPES.
        device: device of the vector.
        offsets: for each segment, the byte of a message at which its fields begin. By default they
            follow each other from 0 on.
        headers: words of 64 bits of the frames of a received message: for each its byte in the
            message, a multiple of 4, and its value. A mean can check them.
        wait: whether the host waits until the table is on the device. If not, only the stream that
            is current now may use it.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        numel: int,
        fmt: str | None,
        dtype: torch.dtype,
        device: torch.device,
        offsets: Sequence[int] | None = None,
        headers: Sequence[tuple[int, int]] = (),
        wait: bool = True,
    ) -> None:
        self._format, self._numel, self._device = Format(fmt, dtype), numel, device
        if offsets is None:
            ends = accumulate(self._format.nbytes(k) + nbytes(n, k) for _, n, k in segments)
            offsets = [0, *ends][:-1]
        width = self._format.width
        at = [offset for offset, s in zip(offsets, segments, strict=True) if s.k]
        self._aligned = all(offset % width == 0 for offset in at)
        self._k = sum(segment.k for segment in segments)
        self._densest = max((s.k / s.n for s in segments if s.n), default=0.0)
        covered = covering(segments, offsets, numel)
        self._step = 16 if all(s.start % 16 == s.n % 16 == 0 for s, _ in covered) else 1
        sizes = {
            "block": _BLOCK, "count": _COUNTED, "group": _GROUPED, "sample": _SAMPLE,
            "fill": 128 * _ROWS, "bit": _BYTES, "tile": _TILE,
        }  # fmt: skip
        rows, self._programs = placed(covered, self._format, sizes)
        self._rows = len(rows)
        self._capacity = sum(row[6] for row in rows)
        table = torch.tensor(rows, dtype=torch.int64)
        zeros = torch.zeros(self._rows * (_ROUNDS * _BINS + 1), dtype=torch.int32)
        copy = torch.Tensor.to if wait else host.copy_to
        self._table, self._counters, self._clean = copy(table, device), copy(zeros, device), True
        self._bound = torch.empty(2 * self._rows, dtype=torch.int32, device=device)
        self._bounded = False
        lengths = [
            4 * self._programs["block"], 2 * self._programs["group"],
            2 * _ROUNDS * self._rows, 3 * self._rows,
        ]  # fmt: skip
        memory = torch.empty(sum(lengths), dtype=torch.int32, device=device)
        self._blocks, self._groups, self._state, self._result = torch.split(memory, lengths)
        self._headers = Headers(headers, device, wait)
        self._launches: dict[object, Any] = {}

    # --- Encoding ---------------------------------------------------------------------------------

    def select(self, x: Tensor) -> Tensor:
        """Return the indices of the entries of largest magnitude of each segment.

        Args:
            x: 1-D, contiguous, of one of DTYPES.

        Returns:
            1-D int64, within `x`, ascending in each segment: those of the first one, and so on.
        """
        return self._select(x, x, x, None)

    def add_and_select(self, g: Tensor, e: Tensor, out: Tensor) -> Tensor:
        """Write ``g + e`` to `out`, and :meth:`select` from it. All are like `x` there."""
        return self._select(g, e, out, None)

    def encode(self, x: Tensor, index: Tensor, frame: Tensor, noise: Tensor | None = None) -> None:
        """Write the message of given entries to `frame`.

        Args:
            x: the vector.
            index: the indices that :meth:`select` would return.
            frame: what is not part of a field stays.
            noise: None rounds to nearest. Otherwise float32 numbers for all values, in [0, 1).
        """
        clear, code = self._launches.get("code") or self._coding()
        if self._k:
            clear(frame)
            code(frame, index)
        self._fill(x, index, frame, noise, False)

    def encode_sum(
        self, g: Tensor, e: Tensor, rest: Tensor, frame: Tensor, noise: Tensor | None = None
    ) -> Tensor:
        """Select from ``g + e``, and write the message to `frame`.

        Args:
            g: 1-D, contiguous, of one of DTYPES.
            e: likewise.
            rest: receives the sum less the message. Non-finite values stay.
            frame: what is not part of a field stays.
            noise: as for :meth:`encode`.

        Returns:
            The indices.
        """
        index = self._select(g, e, rest, frame)
        self._fill(rest, index, frame, noise, True)
        return index

    def subtract(self, frame: Tensor, index: Tensor, x: Tensor, weight: float = 1.0) -> None:
        """Subtract `weight` times the finite values of a message from `x`, at the indices."""
        launch = self._launches.get("subtract") or self._subtraction()
        if self._k:
            launch(x, frame, index, float(weight))

    def _select(self, g: Tensor, e: Tensor, x: Tensor, frame: Tensor | None) -> Tensor:
        index = torch.empty(self._k, dtype=torch.int64, device=self._device)
        kind = "select", g is not x, frame is not None
        launches = self._launches.get(kind) or self._selection(kind)
        if not self._programs["block"]:
            return index
        if not self._clean:  # an earlier call did not end
            self._counters.zero_()
        self._clean = False
        work = torch.empty(2 * self._capacity, dtype=torch.int32, device=self._device)
        out = x if frame is None else frame
        sample, collect, *counts, tally, write = launches
        if not self._bounded:
            sample(g, e)
            self._bounded = True
        collect(g, e, x, work)
        for count in counts:
            count(x, work)
        tally(x, work, out)
        write(x, work, out, index)
        self._clean = True
        return index

    def _fill(
        self, x: Tensor, index: Tensor, frame: Tensor, noise: Tensor | None, subtract: bool
    ) -> None:
        kind = "fill", subtract, noise is not None
        fill = self._launches.get(kind) or self._filling(kind)
        if self._k:
            fill(x, frame, index, index if noise is None else noise)

    # Preparations of launches, each once.

    def _selection(self, kind: tuple[Any, ...]) -> list[Launch]:
        """The first launch is for the first step only."""
        _, add, frame = kind
        rows, place = self._rows, (self._table, self._rows)
        found, counts = self._counters[:rows], self._counters[rows:]
        blocks, groups, state, result = self._blocks, self._groups, self._state, self._result
        grid, tallied = (self._programs["block"],), {"BLOCK": _BLOCK, "GROUPED": _GROUPED}
        every = {**tallied, "FRAME": frame, "DONE": _ROUNDS, "CHUNK": _CHUNK, "BINS": _BINS}
        made = self._launches[kind] = [
            Launch(
                selection.sample, (rows,), *place, self._bound, _MARGIN,
                ADD=add, SAMPLE=_SAMPLE, warps=16,
            ),
            Launch(
                selection.collect, grid, *place, self._bound, found, blocks, groups,
                ADD=add, STEP=self._step, warps=8, **tallied,
            ),
            *(
                Launch(
                    selection.count_digits, (self._programs["count"],),
                    *place, found, counts, state,
                    DONE=done, BLOCK=_COUNTED, BINS=_BINS, warps=8,
                )
                for done in range(_ROUNDS if self._k else 0)
            ),
            Launch(
                selection.tally, grid, *place, self._bound, found, blocks, groups, counts, state,
                result, warps=2, **every,
            ),
            Launch(
                selection.write, grid, *place, found, blocks, groups, counts, result,
                warps=2, **every,
            ),
        ]  # fmt: skip
        return made

    def _coding(self) -> list[Launch]:
        place = (self._programs["fill"],), self._table, self._rows
        made = self._launches["code"] = [
            Launch(coding.clear, *place, CHUNK=_CHUNK),
            Launch(coding.code, *place, BLOCK=128 * _ROWS),
        ]
        return made

    def _filling(self, kind: tuple[Any, ...]) -> Launch:
        levels, (_, subtract, random) = self._format.levels, kind
        made = self._launches[kind] = Launch(
            coding.fill, (self._programs["fill"],), self._table, self._rows,
            largest_scale(levels) if levels else 0.0, SUBTRACT=subtract, RANDOM=random,
            SOURCE=TYPES[self._format.dtype], ROWS=_ROWS, **self._values,
        )  # fmt: skip
        return made

    def _subtraction(self) -> Launch:
        made = self._launches["subtract"] = Launch(
            adding.subtract, (self._programs["fill"],), self._table, self._rows,
            BLOCK=128 * _ROWS, **self._values,
        )  # fmt: skip
        return made

    @property
    def _values(self) -> dict[str, Any]:
        """Constants for the values of messages."""
        value = TYPES[self._format.value]
        return {"VALUE": value, "LEVELS": self._format.levels, "ALIGNED": self._aligned}

    # --- Decoding ---------------------------------------------------------------------------------

    def accumulate(self, messages: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times each message to `out`, in order.

        If an index code is damaged, all of `out` becomes NaN.

        Args:
            messages: a row of uint8 for each message. Rows are contiguous.
            out: 1-D, contiguous, of one of DTYPES. Values and products are rounded to its dtype.
            weight: factor on the values.
        """
        self._add_up(messages, out, out, out, weight, False, None, None)

    def mean(
        self,
        messages: Tensor,
        out: Tensor,
        divisor: float,
        residual: Tensor | None = None,
        finite: Tensor | None = None,
        differences: Tensor | None = None,
    ) -> None:
        """Write the sum of all messages, in order, divided by `divisor`, to `out`.

        The arguments are those of :meth:`accumulate`. The values that `out` had do not matter.

        Args:
            messages: the messages.
            out: receives the mean.
            divisor: usually the number of messages.
            residual: 1-D, contiguous, of one of DTYPES. If the dtype that holds values of both is
                wider than that of `out`, the mean is computed in it, and the error of rounding it
                is added to `residual`.
            finite: scalar float32 that becomes NaN if an element of the mean is not finite.
            differences: int64, (messages, headers); receives the bits in which each word of the
                headers is another one than expected.
        """
        wide = out.dtype if residual is None else torch.promote_types(out.dtype, residual.dtype)
        if residual is None or wide == out.dtype:
            self._add_up(messages, out, out, out, divisor, True, finite, differences)
        else:
            sums = torch.empty(out.shape, dtype=wide, device=out.device)
            self._add_up(messages, out, residual, sums, divisor, True, finite, differences)

    def _add_up(
        self, messages: Tensor, out: Tensor, residual: Tensor, sums: Tensor, factor: float,
        mean: bool, finite: Tensor | None, differences: Tensor | None,
    ) -> None:  # fmt: skip
        if not self._programs["tile"]:
            return
        count = messages.shape[0]
        stride = messages.stride(0) if count > 1 else 0
        if (messages.data_ptr() | stride) & 3:
            messages = aligned(messages)
            stride = messages.stride(0)
        checked = differences is not None and self._headers.words > 0
        kind = "add", count, stride, mean, sums is not out, finite is not None, checked
        launches = self._launches.get(kind) or self._decoding(kind)
        bits, tiles = self._programs["bit"], self._programs["tile"]
        numel = count * (self._k + bits + 2 * tiles) + 1
        empty = torch.empty if bits else torch.zeros
        work = empty(numel, dtype=torch.int32, device=self._device)
        if bits:
            launches[0](messages, work, differences if checked else work)
            launches[1](messages, work)
        launches[2](
            messages, work, out, residual, sums, sums if finite is None else finite, float(factor)
        )

    def _decoding(self, kind: tuple[Any, ...]) -> list[Launch]:
        _, count, stride, mean, wide, finite, checked = kind
        headers = self._headers
        bits, tiles = self._programs["bit"], self._programs["tile"]
        place = self._table, self._rows, self._k, bits, count, stride
        # Enough for the entries of most tiles.
        most = triton.next_power_of_2(ceil(2 * self._densest * _TILE))
        chunk = min(max(most, 32), 512)
        made = self._launches[kind] = [
            Launch(
                decoding.count_bits, (bits, count), *place, headers.table, headers.words,
                BYTES=_BYTES, HEADERS=headers.lanes if checked else 0,
            ),
            Launch(decoding.decode, (bits, count), *place, BYTES=_BYTES, CHUNK=_DECODED),
            Launch(
                adding.add_up, (tiles,), *place, MEAN=mean, WIDE=wide, FINITE=finite,
                STEP=self._step, LANES=triton.next_power_of_2(max(count, 2)), TILE=_TILE,
                CHUNK=chunk, PART=_PART,
                warps=2 if chunk < 512 else 4, **self._values,
            ),
        ]  # fmt: skip
        return made
