"""Checksums of frames: written by the sender and checked by the receiver.

:mod:`torchcomp.wire` defines the frame. On the host, NumPy runs: for short frames, the overhead of
a torch call exceeds the work. On CUDA with Triton, :mod:`.checksum_triton` runs. On any other
accelerator, plain torch handles the frames as the rows of a matrix.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcomp import host
from torchcomp.kernels import backend
from torchcomp.kernels.segments import TOGETHER, batches, joined, split, starts
from torchcomp.wire import framed, signature

_ODD = np.arange(1, 2 << 14, 2)
"""The weights 2 i + 1 of the checksum, for i < 2^14."""


def seal(frames: Tensor, lengths: Sequence[int]) -> None:
    """Write the checksums of frames. All other bytes must have been written, and these be zero.

    Args:
        frames: 1-D uint8, the frames of ``framed(length)`` elements, one after another. Aligned to
            8 bytes.
        lengths: size of each message in bytes.
    """
    sizes, form = [framed(length) for length in lengths], backend.device_form("checksum", frames)
    if host.can_read(frames):
        for frame in split(frames, sizes):
            words = frame.view(torch.int64).numpy()
            words[1] = _checksum(words)
    elif form is not None:
        form.seal(frames, lengths)
    elif len(set(sizes)) == 1:
        rows = frames.view(torch.int64).view(len(sizes), -1)
        torch.sum(rows * _weights(rows), 1, out=rows[:, 1])
    else:
        rows = _rows(split(frames, sizes))
        at = torch.tensor([start // 8 + 1 for start in starts(sizes)])
        checksums = (rows * _weights(rows)).sum(1)
        frames.view(torch.int64).index_copy_(0, host.copy_to(at, frames.device), checksums)


def inspect(frames: Sequence[Tensor], lengths: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    """Check the headers and the checksums of received frames, without a host sync.

    Args:
        frames: 1-D uint8 tensors of ``framed(length)`` elements, aligned to 8 bytes.
        lengths: expected size of each message in bytes.

    Returns:
        Two numbers for each frame, as two int64 tensors on their device. Both are 0 if the frame is
        intact; otherwise :func:`torchcomp.wire.finding` says what they mean. None if the host knows
        already that all frames are intact.
    """
    form = backend.device_form("checksum", frames[0])
    if form is not None:
        both: tuple[Tensor, Tensor] = form.inspect(joined(frames), lengths)
        return both
    if host.can_read(frames[0]):
        found = [_differences(*each) for each in zip(frames, lengths, strict=True)]
        if not any(map(any, found)):
            return None
        signatures, checksums = torch.tensor(found).T
        return signatures, checksums
    runs = batches([frame.numel() // 8 for frame in frames], TOGETHER)
    signatures, checksums = zip(*(_inspect_rows(frames[r], lengths[r]) for r in runs), strict=True)
    return joined(signatures), joined(checksums)


# --- NumPy ----------------------------------------------------------------------------------------


def _differences(frame: Tensor, length: int) -> tuple[int, int]:
    words = frame.view(torch.int64).numpy()
    return _signed(int(words[0]) - signature(length)), _signed(_checksum(words) - int(words[1]))


def _checksum(words: NDArray[np.int64]) -> int:
    """Return the checksum as a signed 64-bit number."""
    # The sum below includes w[1], the checksum itself, whose weight is 3.
    total = -3 * int(words[1])
    # In blocks, so that the weights are a constant. The weight of word start + j is 2 start more
    # than the constant weight 2 j + 1.
    for start in range(0, words.size, _ODD.size):
        block = words[start : start + _ODD.size]
        # int64 wraps around silently, which is correct modulo 2^64.
        total += int(np.dot(block, _ODD[: block.size]))
        if start:
            total += 2 * start * int(block.sum())
    # Signed, like the words that it is compared with.
    return _signed(total)


def _signed(number: int) -> int:
    """Return a number modulo 2^64 as a signed 64-bit number."""
    return (number + 2**63) % 2**64 - 2**63


# --- Plain torch ----------------------------------------------------------------------------------


def _weights(rows: Tensor) -> Tensor:
    """Return the weights 2 i + 1 of a row's words."""
    # A sum of int64 wraps around on a device as well.
    return torch.arange(1, 2 * rows.shape[1], 2, device=rows.device)


def _inspect_rows(frames: Sequence[Tensor], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    rows = _rows(frames)
    expected: int | Tensor = signature(lengths[0])
    if len(set(lengths)) > 1:
        words = torch.tensor([signature(length) for length in lengths])
        expected = host.copy_to(words, rows.device)
    # The sum has the weight 3 for the checksum itself: it is 4 times the checksum of the others.
    total = (rows * _weights(rows)).sum(1)
    return rows[:, 0] - expected, torch.sub(total, rows[:, 1], alpha=4)


def _rows(frames: Sequence[Tensor]) -> Tensor:
    """Return frames as the rows of a matrix of words, filled up with zeros."""
    size = max(frame.numel() for frame in frames)
    if any(frame.numel() < size for frame in frames):
        # Zeros do not change a checksum.
        zeros = frames[0].new_zeros(size)
        frames = [part for frame in frames for part in (frame, zeros[frame.numel() :])]
    return joined(frames).view(-1, size).view(torch.int64)
