"""Headers of frames in Triton, for CUDA: written and checked for any number of frames at once.

See :mod:`torchcomp.wire` for the frame. Frames lie one after another in one tensor, so each begins
at a multiple of 8 bytes. Every word is read once: 1 byte moved per byte of the frames. Sums are
atomic. Addition modulo 2^64 gives the same bits in any order.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcomp.kernels.segments_triton import Rows, row_of, table
from torchcomp.kernels.triton_jit import EXACT, kernel, on_device_of
from torchcomp.wire import DAMAGED, INTACT, OTHER_LENGTH, OTHER_VERSION, VERSION, framed

_WORDS = 2048
"""Words per program."""


def seal(frames: Tensor, lengths: Sequence[int]) -> None:
    """Write the headers of frames, like :func:`torchcomp.wire.seal` for each.

    Args:
        frames: 1-D uint8, contiguous, aligned to 8 bytes: frames of ``framed(length)`` bytes. The
            messages and the padding are written; the checksums must be zero.
        lengths: sizes of the messages in bytes.
    """
    with on_device_of(frames):
        words = frames.view(torch.int64)
        rows, programs = table(_placed, frames.device, lengths, (_WORDS,))
        if programs:
            _add_up[(programs,)](
                words, words, rows, rows.shape[0], SEAL=True, WORDS=_WORDS, **EXACT
            )


def inspect(frames: Tensor, lengths: Sequence[int]) -> Tensor:
    """Check received frames, like :func:`torchcomp.wire.inspect` for each.

    Args:
        frames: 1-D uint8, contiguous, aligned to 8 bytes: frames of ``framed(length)`` bytes.
        lengths: expected sizes of the messages in bytes.

    Returns:
        1-D uint8, one result per frame.
    """
    with on_device_of(frames):
        words = frames.view(torch.int64)
        rows, programs = table(_placed, frames.device, lengths, (_WORDS,))
        found = torch.empty(len(lengths), dtype=torch.uint8, device=frames.device)
        if programs:
            count = rows.shape[0]
            sums = torch.zeros(count, dtype=torch.int64, device=frames.device)
            _add_up[(programs,)](words, sums, rows, count, SEAL=False, WORDS=_WORDS, **EXACT)
            _compare[(count,)](
                words, sums, rows, found, VERSION=VERSION, INTACT=INTACT, DAMAGED=DAMAGED,
                OTHER_VERSION=OTHER_VERSION, OTHER_LENGTH=OTHER_LENGTH, num_warps=1, **EXACT,
            )  # fmt: skip
    return found


def _placed(lengths: Sequence[int], sizes: tuple[int]) -> tuple[Rows, int]:
    """Return for each frame where it begins, its number of words, its first word, its position."""
    rows, program, first = [], 0, 0
    for position, length in enumerate(lengths):
        words = framed(length) // 8
        rows.append((program, first, words, 256 * length + VERSION, position))
        program += triton.cdiv(words, sizes[0])
        first += words
    return tuple(rows), program


# --- Kernels --------------------------------------------------------------------------------------


@kernel("rows")
def _add_up(
    words: tl.tensor,
    sums: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    SEAL: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Add a part of a frame's checksum to its sum; with SEAL, to the header itself."""
    row = row_of(tl.program_id(0), table, rows, 5)
    frame = words + tl.load(row + 1)
    i = (tl.program_id(0) - tl.load(row)) * WORDS + tl.arange(0, WORDS)
    # The checksum itself does not count.
    word = tl.load(frame + i, mask=(i < tl.load(row + 2)) & (i != 1), other=0)
    if SEAL:
        signature = tl.load(row + 3)
        word = tl.where(i == 0, signature, word)
        tl.store(frame + i, word, mask=i == 0)
        tl.atomic_add(frame + 1, tl.sum(word * (2 * i + 1), 0), sem="relaxed")
    else:
        tl.atomic_add(sums + tl.load(row + 4), tl.sum(word * (2 * i + 1), 0), sem="relaxed")


@kernel()
def _compare(
    words: tl.tensor,
    sums: tl.tensor,
    table: tl.tensor,
    found: tl.tensor,
    VERSION: tl.constexpr,
    INTACT: tl.constexpr,
    DAMAGED: tl.constexpr,
    OTHER_VERSION: tl.constexpr,
    OTHER_LENGTH: tl.constexpr,
) -> None:
    frame = tl.program_id(0)
    header = words + tl.load(table + 5 * frame + 1)
    signature, checksum = tl.load(header), tl.load(header + 1)
    result = tl.where(checksum == tl.load(sums + frame), INTACT, DAMAGED)
    result = tl.where(signature == tl.load(table + 5 * frame + 3), result, OTHER_LENGTH)
    result = tl.where((signature & 255) == VERSION, result, OTHER_VERSION)
    tl.store(found + frame, result.to(tl.uint8))
