"""Wire: the static byte layout of a message, and the frame in which it is sent.

docs/wire.md specifies both. A message is the concatenation of its fields, whose layout depends only
on the number of elements and the dtype: every plan, table and test takes its size from
:func:`nbytes`. Without checksums, the header of a frame is the same in every step: it is written
once.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, islice

import torch
from torch import Tensor

from torchcomp.engine import host

VERSION = 6
"""Version of the wire format. It changes whenever the bytes of any message change.

The ranks compare it when a model is registered.
"""

MAGIC = 0xC7
"""The second byte of every frame."""

MARK = VERSION | MAGIC << 8
"""The lowest 16 bits of every frame."""

HEADER = 16
"""Number of bytes of a frame before the message."""

INTACT, NO_FRAME, OTHER_VERSION, OTHER_LENGTH, OTHER_LAYOUT, DAMAGED = range(6)
"""The results of :meth:`Frames.finding`."""

_SEPARATE = 4
"""Up to this many fields are copied to a device one by one."""

FINDINGS = {
    NO_FRAME: "was damaged on the way: it does not begin like a frame",
    OTHER_VERSION: f"has a different version of the wire format than this rank's version {VERSION}",
    OTHER_LENGTH: "has a different length than this rank expects",
    OTHER_LAYOUT: "has a different layout than this rank expects: other fields, dtypes or counts",
    DAMAGED: "was damaged on the way: its checksum does not match its bytes and layout",
}


@dataclass(frozen=True)
class Field:
    """One array of a message."""

    name: str  # for error messages and the signature
    dtype: torch.dtype  # of the values in the message
    count: int  # number of elements

    @property
    def nbytes(self) -> int:
        """Size of the field in bytes."""
        return self.count * self.dtype.itemsize


Layout = tuple[Field, ...]
Parts = tuple[Tensor, ...]


@lru_cache(maxsize=4096)
def nbytes(layout: Layout) -> int:
    """Return the size in bytes of a message with this layout."""
    return sum(field.nbytes for field in layout)


def framed(length: int) -> int:
    """Return the size in bytes of the frame of a message of `length` bytes."""
    return HEADER + -(-length // 8) * 8


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

    A message is the concatenation of the messages of its vectors, of which `layouts` has the fields
    and `counts` the number in each message; by default one. An empty message has no frame.
    `signatures` are used if they are not those of the layouts. `sizes` are the bytes of the frames.
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
        vectors = iter(self.layouts)
        counts = [1] * len(self.layouts) if counts is None else counts
        messages: list[Layout] = [sum(islice(vectors, count), ()) for count in counts]
        self.lengths = tuple(map(nbytes, messages))
        self.sizes = tuple(framed(length) if length else 0 for length in self.lengths)
        self.nbytes = sum(self.sizes)
        begins = [0, *accumulate(self.sizes)]
        fields = [
            place
            for begin, message in zip(begins, messages, strict=False)
            for place in _places(begin + HEADER, message)
        ]
        places = iter(fields)
        # By vector, where its fields begin and end, and whether a view in their dtype is aligned.
        self._places = [list(islice(places, len(layout))) for layout in self.layouts]
        # Many fields are copied to a device as bytes: all of them in one launch.
        aligned = all(aligned for *_, aligned in fields)
        self._by_bytes = not aligned or (not self.on_host and len(fields) > _SEPARATE)
        # Where the frames begin and end, in 64-bit words, and the two words of their headers.
        self._spans = [
            (begin // 8, (begin + size) // 8)
            for begin, size in zip(begins, self.sizes, strict=False)
            if size
        ]
        signatures = [signature(m) for m in messages] if signatures is None else signatures
        headers = [
            (MARK | nbytes(message) << 16, signed)
            for message, signed in zip(messages, signatures, strict=True)
            if nbytes(message)
        ]
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

    def outgoing(self) -> Tensor:
        """Return the memory of the frames to send, with headers: the same in every step."""
        return self._outgoing

    def pack(self, messages: Sequence[Parts]) -> Tensor:
        """Write the fields of each vector's message to :meth:`outgoing`, and return that."""
        targets, sources = [], []
        for parts, layout, within in zip(messages, self.layouts, self._fields, strict=True):
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
            self.seal(self._outgoing)
        return self._outgoing

    @property
    def placed(self) -> Sequence[Parts]:
        """What a compressor returns that has written the fields in :meth:`outgoing` itself."""
        return self._fields

    def seal(self, memory: Tensor) -> None:
        """Write the checksums of frames, 1-D uint8, into their headers."""
        words = memory.view(torch.int64)
        for (begin, end), layout in zip(self._spans, self._words[:, 1].tolist(), strict=True):
            words[begin + 1 : begin + 2] = checksum(words[begin + 2 : end]) + layout

    @cached_property
    def _outgoing(self) -> Tensor:
        words = torch.zeros(self.nbytes // 8, dtype=torch.int64, device=self.device)
        if self._spans:
            words.index_copy_(0, self._at, self.expected.view(-1))
        return words.view(torch.uint8)

    @cached_property
    def _fields(self) -> list[Parts]:
        """The fields in :meth:`outgoing`, by vector; as bytes where one is not aligned."""
        memory = self._outgoing
        return [
            tuple(
                memory[begin:end].view(dtype) if aligned else memory[begin:end]
                for begin, end, dtype, aligned in places
            )
            for places in self._places
        ]

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
            found = words.index_select(1, self._at).view(-1, 2)
        if self.checksum:
            sums = [checksum(words[:, begin + 2 : end]) for begin, end in self._spans]
            found = found.clone()
            found[:, 1] -= torch.stack(sums, 1).view(-1)
        if self.on_host and (found.numpy().reshape(-1, *self._words.shape) == self._words).all():
            return None
        return found

    def finding(self, first: int, second: int) -> int:
        """Return INTACT, or what is wrong with a frame."""
        if first & 0xFF00:
            return NO_FRAME
        if first & 0xFF:
            return OTHER_VERSION
        if first:
            return OTHER_LENGTH
        if second:
            return DAMAGED if self.checksum else OTHER_LAYOUT
        return INTACT

    @cached_property
    def expected(self) -> Tensor:
        """The headers without a checksum, on the device: int64, a row of two words each."""
        return self._table[1].view(-1, 2)

    @cached_property
    def _at(self) -> Tensor:
        """The positions of the words of :attr:`expected`, on the device."""
        return self._table[0]

    @cached_property
    def _table(self) -> Tensor:
        # One copy to the device for both.
        begins = torch.tensor([begin for begin, _ in self._spans])
        at = torch.stack([begins, begins + 1], 1)
        return host.copy_to(torch.stack([at.view(-1), self._headers.view(-1)]), self.device)


def _places(begin: int, layout: Layout) -> Iterator[tuple[int, int, torch.dtype, bool]]:
    """Yield where each field begins and ends, its dtype, and whether it is aligned to that."""
    for field in layout:
        end = begin + field.nbytes
        # An empty field can lie anywhere: where it is aligned.
        at = begin if field.count else 0
        yield at, at + field.nbytes, field.dtype, at % field.dtype.itemsize == 0
        begin = end
