"""Vectors: what kernels know of the parts of a tensor that are compressed separately.

Kernels are chosen once for the vectors of a tensor. All forms give the same results bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchcomp.kernels.segments import Segment
from torchcomp.routes.wire import Frames, Parts


class Prepared(Protocol):
    """What the kernels know of the vectors of a tensor."""

    segments: tuple[Segment, ...]
    device: torch.device
    dtype: torch.dtype
    fields: Sequence[Parts] | None
    frames: Frames | None


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
