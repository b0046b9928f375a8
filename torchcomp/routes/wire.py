"""Wire: the static byte layout of a message, and the frame in which it is sent.

docs/wire.md specifies both. The layout of a message depends only on the number of elements and the
dtype. Without checksums, the header of a frame is the same in every step: it is written once.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, islice

import torch
from torch import Tensor

from torchcomp.engine import host

VERSION = 6
"""It changes whenever the bytes of any message change. Ranks compare it when they register."""

MAGIC = 0xC7  # the second byte of every frame
MARK = VERSION | MAGIC << 8  # the lowest 16 bits of every frame
HEADER = 16  # bytes of a frame before the message

_SEPARATE = 4  # up to this many fields are copied to a device one by one


@dataclass(frozen=True)
class Field:
    """One array of a message."""

    name: str  # for error messages and the signature
    dtype: torch.dtype  # of the values in the message
    count: int  # number of elements

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


Layout = tuple[Field, ...]
Parts = tuple[Tensor, ...]


@lru_cache(maxsize=4096)
def nbytes(layout: Layout) -> int:
    """Return the size in bytes of a message with this layout."""
    return sum(field.nbytes for field in layout)


def framed(length: int) -> int:
    """Return the size in bytes of the frame of `length` bytes. An empty message has no frame."""
    return HEADER + -(-length // 8) * 8 if length else 0


@lru_cache(maxsize=4096)
def signature(layout: Layout) -> int:
    """Return a 63-bit number that differs for layouts that differ in a name, dtype or count."""
    text = "".join(f"{f.name} {str(f.dtype).removeprefix('torch.')} {f.count}\n" for f in layout)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") & (2**63 - 1)


def counted_signature(base: int, counts: Iterable[int]) -> int:
    """Return the signature of a message whose number of entries varies, in 63 bits."""
    return base + sum([(2 * i + 1) * count for i, count in enumerate(counts)])


def checksum(words: Tensor) -> Tensor:
    """Return the sum of (2 i + 1) w[i] modulo 2^64 over the last dimension of `words` (int64)."""
    # int64 wraps around silently, which is correct modulo 2^64.
    weights = torch.arange(1, 2 * words.shape[-1], 2, device=words.device)
    return (words * weights).sum(-1)


class Frames:
    """The frames of some messages, one after another: all that is the same in every step.

    `layouts` are those of vectors, of which `counts` says how many there are in each message; by
    default one. `signatures` are used if they are not those of the layouts.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        device: torch.device,
        checksum: bool = False,
        counts: Sequence[int] | None = None,
        signatures: Sequence[int] | None = None,
    ) -> None:
        self.layouts, self.device, self.checksum = tuple(layouts), device, checksum
        self.on_host = host.can_read(torch.empty(0, device=device))
        counts = [1] * len(self.layouts) if counts is None else counts
        vectors = iter(self.layouts)
        messages: list[Layout] = [sum(islice(vectors, count), ()) for count in counts]
        signatures = [signature(m) for m in messages] if signatures is None else signatures
        self.lengths = tuple(map(nbytes, messages))
        self.sizes = tuple(map(framed, self.lengths))
        self.nbytes = sum(self.sizes)
        fields: list[tuple[int, int, torch.dtype, bool]] = []
        # Where the frames begin and end, in 64-bit words, and the two words of their headers.
        self._spans: list[tuple[int, int]] = []
        headers = []
        ends = accumulate(self.sizes)
        for message, signed, size, end in zip(messages, signatures, self.sizes, ends, strict=True):
            fields += _places(end - size + HEADER, message)
            if size:
                self._spans.append(((end - size) // 8, end // 8))
                headers.append((MARK | nbytes(message) << 16, signed))
        places = iter(fields)
        # By vector, where its fields begin and end, and whether a view in their dtype is aligned.
        self._places = [list(islice(places, len(layout))) for layout in self.layouts]
        # Many fields are copied to a device as bytes: all of them in one launch.
        aligned = all(aligned for *_, aligned in fields)
        self._by_bytes = not aligned or (not self.on_host and len(fields) > _SEPARATE)
        self._headers = torch.tensor(headers, dtype=torch.int64).view(-1, 2)
        self._words = self._headers.numpy()
        # Equally long frames are the rows of a matrix.
        self._even = self._spans[0][1] if len(set(self.sizes) - {0}) == 1 else 0

    @cached_property
    def offsets(self) -> list[int]:
        """For each vector, the byte at which its fields begin; 0 if it has none."""
        return [
            min((begin for begin, end, *_ in places if end > begin), default=0)
            for places in self._places
        ]

    # --- Sending ---

    @cached_property
    def placed(self) -> Sequence[Parts]:
        """The fields in :attr:`outgoing`, by vector; as bytes where one is not aligned."""
        memory = self.outgoing
        return [
            tuple(
                memory[begin:end].view(dtype) if aligned else memory[begin:end]
                for begin, end, dtype, aligned in places
            )
            for places in self._places
        ]

    def pack(self, messages: Sequence[Parts]) -> Tensor:
        """Write the fields of each vector's message to :attr:`outgoing`, and return that."""
        targets, sources = [], []
        for parts, layout, within in zip(messages, self.layouts, self.placed, strict=True):
            for part, field, target in zip(parts, layout, within, strict=True):
                if part is target:
                    continue
                if part.dtype != field.dtype or part.numel() != field.count:
                    raise ValueError(
                        f"field '{field.name}' is {field.count} x {field.dtype} in the layout, but "
                        f"the compressor returned {part.numel()} x {part.dtype}"
                    )
                targets.append(target.view(torch.uint8) if self._by_bytes else target)
                sources.append(part.contiguous().view(torch.uint8) if self._by_bytes else part)
        if targets:
            torch._foreach_copy_(targets, sources)
        if self.checksum:
            self.seal(self.outgoing)
        return self.outgoing

    def seal(self, memory: Tensor) -> None:
        """Write the checksums of frames, 1-D uint8, into their headers."""
        words = memory.view(torch.int64)
        for (begin, end), layout in zip(self._spans, self._words[:, 1].tolist(), strict=True):
            words[begin + 1 : begin + 2] = checksum(words[begin + 2 : end]) + layout

    @cached_property
    def outgoing(self) -> Tensor:
        """The memory of the frames to send, with headers: the same in every step."""
        words = torch.zeros(self.nbytes // 8, dtype=torch.int64, device=self.device)
        if self._spans:
            words.index_copy_(0, *self._table)
        return words.view(torch.uint8)

    # --- Receiving ---

    def unpack(self, received: Tensor) -> list[tuple[Parts, ...]]:
        """Return the messages of each row, by vector. Fields are views where they are aligned."""
        # No other code checks the lengths of fields: decoders rely on this.
        if received.shape[-1] != self.nbytes:
            raise ValueError(f"{received.shape[-1]} bytes do not fit frames of {self.nbytes} bytes")
        # A view in a wider dtype must begin at a multiple of its item size.
        if received.storage_offset() % 8:
            received = received.clone()
        rows = received if received.dim() == 2 else received.unsqueeze(0)
        vectors: list[Iterable[Parts]] = []
        for places in self._places:
            columns = []
            for begin, end, dtype, aligned in places:
                column = rows[:, begin:end]
                columns.append((column if aligned else column.clone()).view(dtype).unbind())
            vectors.append(zip(*columns, strict=True) if columns else [()] * len(rows))
        return list(zip(*vectors, strict=True)) if vectors else [()] * len(rows)

    def headers(self, received: Tensor) -> Tensor | None:
        """Return the headers of received frames, or None if the host sees that they are right."""
        words = received.view(torch.int64)
        if self._even:
            found = words.view(-1, self._even)[:, :2]
        else:
            found = words.index_select(1, self._table[0]).view(-1, 2)
        if self.checksum:
            sums = [checksum(words[:, begin + 2 : end]) for begin, end in self._spans]
            found = found.clone()
            found[:, 1] -= torch.stack(sums, 1).view(-1)
        if self.on_host and (found.numpy().reshape(-1, *self._words.shape) == self._words).all():
            return None
        return found

    @cached_property
    def expected(self) -> Tensor:
        """The headers without a checksum, on the device: int64, a row of two words each."""
        return self._table[1].view(-1, 2)

    @cached_property
    def _table(self) -> Tensor:
        # The positions of the headers' words, and these words: one copy to the device for both.
        begins = torch.tensor([begin for begin, _ in self._spans])
        at = torch.stack([begins, begins + 1], 1)
        return host.copy_to(torch.stack([at.view(-1), self._headers.view(-1)]), self.device)


def _places(begin: int, layout: Layout) -> list[tuple[int, int, torch.dtype, bool]]:
    """Return where each field begins and ends, its dtype, and whether it is aligned to that."""
    places = []
    for field in layout:
        # An empty field can lie anywhere: where it is aligned.
        at = begin if field.count else 0
        places.append((at, at + field.nbytes, field.dtype, at % field.dtype.itemsize == 0))
        begin += field.nbytes
    return places
