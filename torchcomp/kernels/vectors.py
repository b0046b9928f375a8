"""Vectors: what kernels know of the parts of a tensor that are compressed separately."""

from collections.abc import Sequence
from typing import Protocol

import torch

from torchcomp.kernels.segments import Segment
from torchcomp.wire import Frames, Parts


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
