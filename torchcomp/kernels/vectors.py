"""Vectors: what kernels know of the parts of a tensor that are compressed separately.

Kernels are chosen once for the vectors of a tensor. All forms give the same results bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torchcomp.kernels.segments import Segment
from torchcomp.routes.wire import Frames, Parts


class Prepared(Protocol):
    """What the kernels know of the vectors of a tensor.

    Attributes:
        segments: where each vector is, and how many of its entries are sent.
        device: the device of the tensor.
        dtype: dtype to which values are rounded before they are encoded.
        fields: where the fields of each vector lie in the frames to send, if they are known.
        frames: those frames.
    """

    segments: tuple[Segment, ...]
    device: torch.device
    dtype: torch.dtype
    fields: Sequence[Parts] | None
    frames: Frames | None


@dataclass
class Parted:
    """Vectors that are not encoded, but only selected from; see :class:`Prepared`."""

    segments: tuple[Segment, ...]
    device: torch.device
    dtype: torch.dtype
    fields: Sequence[Parts] | None = None
    frames: Frames | None = None


class Kernels(ABC):
    """The kernels of one format of messages.

    Args:
        vectors: the vectors. Of these, only `fields` and `frames` change later.
        fmt: format of the values; see :func:`.quantize.layout`.

    Attributes:
        reads_frames: whether ``mean_of`` decodes frames where they arrived.
    """

    reads_frames = False

    def __init__(self, vectors: Prepared, fmt: str | None) -> None:
        self.vectors, self.fmt = vectors, fmt

    @abstractmethod
    def accumulate(
        self, messages: Sequence[Sequence[Parts]], out: Tensor, weight: float = 1.0
    ) -> None:
        """Add `weight` times each decoded message to `out`, in order."""
