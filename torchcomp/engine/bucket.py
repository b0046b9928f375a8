"""Bucket: the gradients of several parameters as one flat vector, and how they are grouped."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, compress
from math import prod

import torch
from torch import Tensor

MIB = 2**20
Names = tuple[str, ...]
Group = Names
"""Names of parameters that are compressed together."""

Caps = tuple[int, ...]
"""Sizes in bytes at which groups are full: of the first, the second, ... and all further groups."""

DEFAULT_CAPS: Caps = (1 * MIB, 25 * MIB)  # as DDP, whose first exchange begins early


@dataclass(frozen=True)
class BucketShape:
    """The static properties of a bucket."""

    names: Names  # parameter names, in the order of their elements
    shapes: tuple[tuple[int, ...], ...]  # shape of each parameter
    dtype: torch.dtype
    strides: tuple[tuple[int, ...], ...] = ()  # of each parameter; () if all are contiguous

    @classmethod
    def of(cls, names: Iterable[str], parameters: Mapping[str, Tensor]) -> "BucketShape":
        """Return the shape of a bucket of these parameters, which must have one dtype."""
        names = tuple(names)
        chosen = [parameters[name] for name in names]
        contiguous = all(parameter.is_contiguous() for parameter in chosen)
        # A tensor on "meta" has strides but no memory.
        flats = [torch.empty(parameter.numel(), device="meta") for parameter in chosen]
        strides = () if contiguous else tuple(m.stride() for m in map(memory_order, chosen, flats))
        return cls(names, tuple(tuple(p.shape) for p in chosen), chosen[0].dtype, strides)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Each step looks up plans by shape, which can have hundreds of names. `__eq__` compares the
        # strides as well.
        return hash((self.names, self.shapes, self.dtype))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(prod, self.shapes))

    @cached_property
    def numel(self) -> int:
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def select(self, names: Iterable[str]) -> "BucketShape":
        """Return the shape of a bucket of only these parameters, in the order of this bucket."""
        chosen = set(names)
        wanted = [name in chosen for name in self.names]
        shapes, strides = (tuple(compress(each, wanted)) for each in (self.shapes, self.strides))
        return BucketShape(tuple(compress(self.names, wanted)), shapes, self.dtype, strides)

    def wide(self) -> "BucketShape":
        """Return the same shape in float32, or in its own dtype if that is wider."""
        return replace(self, dtype=torch.promote_types(self.dtype, torch.float32))

    def shards(self, world_size: int) -> tuple["Shard", ...]:
        """Return each rank's part: rank r of W owns [r n // W, (r + 1) n // W) of n elements."""
        return tuple(self.shard(world_size, rank) for rank in range(world_size))

    def shard(self, world_size: int, rank: int) -> "Shard":
        """Return one of :meth:`shards`, without listing the others."""
        start, stop = (cut(self.numel, world_size, each) for each in (rank, rank + 1))
        contents = []
        for name, size, end in zip(self.names, self.sizes, accumulate(self.sizes), strict=True):
            first, last = max(end - size, start), min(end, stop)
            if first < last:
                contents.append((name, last - first, first - (end - size)))
        return Shard(start, stop, *(list(zip(*contents, strict=True)) or [(), (), ()]))


@dataclass
class Bucket:
    """The flat vector that an aggregator works on, with its shape."""

    shape: BucketShape
    # 1-D and contiguous. Each parameter's part is in the memory order of the parameter, as in DDP.
    flat: Tensor
    # Whether the mean stays in `flat` until the step ends: nothing else is written to its memory.
    lasts: bool = False

    @classmethod
    def read(cls, shape: BucketShape, tensors: Mapping[str, Tensor]) -> "Bucket":
        """Copy tensors into a new bucket, in the bucket's dtype."""
        device = tensors[shape.names[0]].device if shape.names else None
        bucket = cls(shape, torch.empty(shape.numel, dtype=shape.dtype, device=device))
        views = bucket.tensors()
        if views:
            # One call: many small tensors then take few kernel launches.
            torch._foreach_copy_(list(views.values()), [tensors[name].detach() for name in views])
        return bucket

    @torch.no_grad()
    def write(self, tensors: Mapping[str, Tensor]) -> None:
        views = self.tensors()
        if views:
            torch._foreach_copy_([tensors[name] for name in views], list(views.values()))

    @property
    def names(self) -> Names:
        return self.shape.names

    def parts(self) -> dict[str, Tensor]:
        """Each parameter's part of `flat`, as a 1-D view."""
        parts = torch.split(self.flat, list(self.shape.sizes))
        return dict(zip(self.shape.names, parts, strict=True))

    def tensors(self) -> dict[str, Tensor]:
        """Each parameter's part of `flat`, as a view in the parameter's shape."""
        shape, parts = self.shape, self.parts().items()
        if not shape.strides:
            return {n: part.view(s) for (n, part), s in zip(parts, shape.shapes, strict=True)}
        layouts = zip(parts, shape.shapes, shape.strides, strict=True)
        return {n: p.as_strided(s, stride, p.storage_offset()) for (n, p), s, stride in layouts}


@dataclass(frozen=True)
class Shard:
    """The contiguous part of a bucket that one rank owns."""

    start: int  # first element within the bucket
    stop: int  # one past the last element
    names: Names  # parameters with at least one element in the shard, in order
    sizes: tuple[int, ...]  # number of elements of each of them
    offsets: tuple[int, ...]  # index of the first of these elements within the parameter

    @property
    def span(self) -> slice:
        return slice(self.start, self.stop)


def cut(numel: int, world_size: int, rank: int) -> int:
    """Return the first element of a rank's shard of `numel` elements."""
    return rank * numel // world_size


def partition(
    parameters: Iterable[tuple[str, Tensor]], caps: Caps = DEFAULT_CAPS
) -> tuple[Group, ...]:
    """Group parameters as DDP does at first: in reverse order, up to a size."""
    groups: list[Group] = []
    # A bucket is one tensor, so each dtype and device fills a group of its own.
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[str], int]] = {}
    for name, parameter in reversed(list(parameters)):
        kind = (parameter.dtype, parameter.device)
        names, size = open_groups.pop(kind, ([], 0))
        names, size = [*names, name], size + parameter.nbytes
        # As in DDP, the parameter that fills a group still belongs to it, whatever its size.
        if size >= caps[min(len(groups), len(caps) - 1)]:
            groups.append(tuple(names))
        else:
            open_groups[kind] = (names, size)
    groups.extend(tuple(names) for names, _ in open_groups.values())
    return tuple(groups)


def merge(groups: Iterable[Group], parameters: Mapping[str, Tensor]) -> tuple[Group, ...]:
    """Merge all groups into one, or into one for each dtype and device if there are several."""
    merged: dict[tuple[torch.dtype, torch.device], Group] = {}
    for group in groups:
        first = parameters[group[0]]
        kind = (first.dtype, first.device)
        merged[kind] = (*merged.get(kind, ()), *group)
    return tuple(merged.values())


def memory_order(parameter: Tensor, flat: Tensor) -> Tensor:
    """View a parameter's part of a flat bucket in the parameter's shape, as DDP stores it.

    A dense, non-overlapping parameter is in its own memory order, and any other is contiguous.
    """
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.size(), strict=True)):
        # The stride of a dimension of size 1 has no meaning, and torch allows any.
        if size != 1 and stride != expected:
            return flat.view(parameter.size())
        expected *= size
    return flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset())
