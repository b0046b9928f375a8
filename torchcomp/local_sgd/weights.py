"""Weights: trained parameters of a model, read and written as flat buckets."""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchcomp.bucket import Bucket, Group, memory_order


class Weights:
    """Reads and writes parameters that local steps average.

    Args:
        parameters: by name, in registration order; parameters may be added later.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, in their own dtypes."""
        return sum(parameter.nbytes for parameter in self.parameters.values())

    def zeros(self, names: Group, sizes: tuple[int, ...]) -> Bucket:
        """A bucket of zeros for some elements of parameters, in float32 or wider."""
        first = self.parameters[names[0]]
        dtype = torch.promote_types(first.dtype, torch.float32)
        return Bucket(names, sizes, torch.zeros(sum(sizes), dtype=dtype, device=first.device))

    def sizes(self, group: Group) -> tuple[int, ...]:
        """Number of elements of each parameter of a group."""
        return tuple(self.parameters[name].numel() for name in group)

    def groups_of(self, state: Mapping[str, Any]) -> tuple[Group, ...]:
        """The groups of a state that hold these parameters."""
        return tuple(tuple(group) for group in state["buckets"] if group[0] in self.parameters)

    @torch.no_grad()
    def read(self, group: Group) -> Bucket:
        """A copy of the values of a group's parameters, in float32 or wider."""
        bucket = self.zeros(group, self.sizes(group))
        for name, part in bucket.parts().items():
            parameter = self.parameters[name]
            memory_order(parameter, part).copy_(parameter)
        return bucket

    @torch.no_grad()
    def write(self, bucket: Bucket) -> None:
        """Give the parameters of a bucket its values, rounded to their own dtypes."""
        for name, part in bucket.parts().items():
            parameter = self.parameters[name]
            parameter.copy_(memory_order(parameter, part))

    def digest(self) -> int:
        """A checksum of all values, to recognise them."""
        checksum = 0
        for parameter in self.parameters.values():
            checksum = zlib.crc32(_raw(parameter), checksum)
        return checksum


def _raw(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()
