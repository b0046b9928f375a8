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
from torchcomp.wire import framed, signature

_WORDS = 2048
"""Words per program."""


def seal(frames: Tensor, lengths: Sequence[int]) -> None:
    """Write the headers of frames, like :func:`torchcomp.kernels.checksum.seal`.

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


def inspect(frames: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Check received frames, like :func:`torchcomp.kernels.checksum.inspect`.

    Args:
        frames: 1-D uint8, contiguous, aligned to 8 bytes: frames of ``framed(length)`` bytes.
        lengths: expected sizes of the messages in bytes.

    Returns:
        Two numbers for each frame, as two int64 tensors.
    """
    with on_device_of(frames):
        words = frames.view(torch.int64)
        rows, programs = table(_placed, frames.device, lengths, (_WORDS,))
        found = torch.zeros((2, len(lengths)), dtype=torch.int64, device=frames.device)
        if programs:
            _add_up[(programs,)](
                words, found, rows, rows.shape[0], SEAL=False, WORDS=_WORDS, **EXACT
            )
    signatures, checksums = found
    return signatures, checksums


def _placed(lengths: Sequence[int], sizes: tuple[int]) -> tuple[Rows, int]:
    """Return for each frame where it begins, its number of words, its first word, its position."""
    rows, program, first = [], 0, 0
    for position, length in enumerate(lengths):
        words = framed(length) // 8
        rows.append((program, first, words, signature(length), position))
        program += triton.cdiv(words, sizes[0])
        first += words
    return tuple(rows), program


# --- Kernels --------------------------------------------------------------------------------------


@kernel("rows")
def _add_up(
    words: tl.tensor,
    found: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    SEAL: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Add a part of a frame's checksum to its sum; with SEAL, to the header itself."""
    row = row_of(tl.program_id(0), table, rows, 5)
    frame = words + tl.load(row + 1)
    i = (tl.program_id(0) - tl.load(row)) * WORDS + tl.arange(0, WORDS)
    word = tl.load(frame + i, mask=i < tl.load(row + 2), other=0)
    if SEAL:
        # The checksum itself does not count: it is zero.
        signature = tl.load(row + 3)
        word = tl.where(i == 0, signature, word)
        word = tl.where(i == 1, 0, word)
        tl.store(frame + i, word, mask=i == 0)
        tl.atomic_add(frame + 1, tl.sum(word * (2 * i + 1), 0), sem="relaxed")
    else:
        # The difference of the signatures; the checksum of the others minus the one received.
        position = tl.load(row + 4)
        tl.store(found + position + i, word - tl.load(row + 3), mask=i == 0)
        weight = tl.where(i == 1, -1, 2 * i + 1)
        tl.atomic_add(found + rows + position, tl.sum(word * weight, 0), sem="relaxed")
