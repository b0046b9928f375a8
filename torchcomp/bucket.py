"""Bucket: the gradients of a few parameters as one flat vector, and how parameters are grouped."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

MIB = 2**20


@dataclass
class Bucket:
    """What an aggregator works on.

    Attributes:
        names: parameter names, in the order of their elements in `flat`.
        sizes: number of elements of each parameter.
        flat: 1-D contiguous tensor of ``sum(sizes)`` gradient (or parameter) elements; each
            parameter's part is in its memory order, as in DDP's buckets.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    flat: Tensor

    def parts(self) -> dict[str, Tensor]:
        """Each parameter's part of `flat`, as a view."""
        return dict(zip(self.names, torch.split(self.flat, list(self.sizes)), strict=True))


@dataclass(frozen=True)
class Caps:
    """Sizes at which a group of parameters is closed, in bytes.

    Attributes:
        first: for the first group, small so that communication starts early in backward.
        rest: for every further group.
    """

    first: int = 1 * MIB
    rest: int = 25 * MIB


Group = tuple[str, ...]


def partition(parameters: Iterable[tuple[str, nn.Parameter]], caps: Caps) -> tuple[Group, ...]:
    """Group parameters as DDP's documentation describes: in reverse order, up to a size.

    DDP itself re-groups after the first iteration, in the order in which gradients became ready.
    This partition never changes, so what is selected within a group depends on the model alone:
    not on the iteration, and not on whether the run was resumed.

    Args:
        parameters: (name, parameter) pairs in registration order.
        caps: sizes at which a group is closed.

    Returns:
        Groups of names; each holds parameters of one dtype and device.
    """
    groups: list[Group] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[str], int]] = {}
    for name, parameter in reversed(list(parameters)):
        kind = (parameter.dtype, parameter.device)
        names, size = open_groups.pop(kind, ([], 0))
        names, size = [*names, name], size + parameter.nbytes
        if size >= (caps.rest if groups else caps.first):
            groups.append(tuple(names))
        else:
            open_groups[kind] = (names, size)
    groups.extend(tuple(names) for names, _ in open_groups.values())
    return tuple(groups)


def memory_order(parameter: Tensor, flat: Tensor) -> Tensor:
    """View a parameter's part of a flat bucket in the parameter's shape.

    DDP lays a dense, non-overlapping parameter (channels_last, for one) out in its own memory
    order, and any other contiguously.

    Args:
        parameter: gives shape and strides.
        flat: 1-D tensor of ``parameter.numel()`` elements.
    """
    if _is_dense(parameter):
        return flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset())
    return flat.view(parameter.size())


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class Shard:
    """The contiguous part of a bucket that one rank owns.

    Attributes:
        start: first element within the bucket.
        stop: one past the last element.
        names: parameters that have elements in it, in order.
        sizes: how many elements of each.
        offsets: the first of them within each parameter.
    """

    start: int
    stop: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def span(self) -> slice:
        """Its elements within the bucket."""
        return slice(self.start, self.stop)


@lru_cache(maxsize=1024)
def shards(names: tuple[str, ...], sizes: tuple[int, ...], world_size: int) -> tuple[Shard, ...]:
    """Divide a bucket among the ranks, rank r owning [r n / W, (r + 1) n / W) of n elements."""
    total = sum(sizes)
    cuts = [rank * total // world_size for rank in range(world_size + 1)]
    return tuple(_shard(names, sizes, start, stop) for start, stop in pairwise(cuts))


def _shard(names: tuple[str, ...], sizes: tuple[int, ...], start: int, stop: int) -> Shard:
    held = []
    for name, size, end in zip(names, sizes, accumulate(sizes), strict=True):
        first, last = max(end - size, start), min(end, stop)
        if first < last:
            held.append((name, last - first, first - (end - size)))
    columns = list(zip(*held, strict=True)) or [(), (), ()]
    return Shard(start, stop, *columns)


def owned_shards(
    groups: Iterable[Group], parameters: Mapping[str, nn.Parameter], rank: int, world_size: int
) -> list[Shard]:
    """The shard of each bucket that a rank owns."""
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    return [
        shards(names, tuple(sizes[name] for name in names), world_size)[rank] for names in groups
    ]


def merge(groups: Iterable[Group], parameters: Mapping[str, nn.Parameter]) -> tuple[Group, ...]:
    """One group of all parameters, or one for each dtype and device where there are several."""
    merged: dict[tuple[torch.dtype, torch.device], Group] = {}
    for group in groups:
        first = parameters[group[0]]
        kind = (first.dtype, first.device)
        merged[kind] = (*merged.get(kind, ()), *group)
    return tuple(merged.values())
