"""Bucket: the gradients of a few parameters as one flat vector, and how parameters are grouped."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

MIB = 2**20
Names = tuple[str, ...]
Group = Names
"""Names of parameters that are compressed together."""


@dataclass(frozen=True)
class BucketShape:
    """All that is static about a bucket."""

    names: Names  # of the parameters, in the order of their elements
    shapes: tuple[tuple[int, ...], ...]  # of each parameter
    dtype: torch.dtype
    strides: tuple[tuple[int, ...], ...] = ()  # of each parameter; () if all are contiguous

    @classmethod
    def of(cls, names: Iterable[str], parameters: Mapping[str, Tensor]) -> "BucketShape":
        """The shape of a bucket of these parameters, which have one dtype."""
        names = tuple(names)
        chosen = [parameters[name] for name in names]
        return cls(
            names,
            tuple(tuple(parameter.shape) for parameter in chosen),
            chosen[0].dtype,
            tuple(map(_strides, chosen)) if any(not p.is_contiguous() for p in chosen) else (),
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Kept, because every step looks its plans up by shapes that hold hundreds of names.
        return hash((self.names, self.shapes, self.dtype))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(map(prod, self.shapes))

    @cached_property
    def numel(self) -> int:
        """Number of elements in all."""
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize

    def select(self, names: Iterable[str]) -> "BucketShape":
        """The shape of a bucket of these parameters alone, in their order here."""
        wanted = set(names)
        chosen = [place for place, name in enumerate(self.names) if name in wanted]
        return BucketShape(
            tuple(self.names[i] for i in chosen),
            tuple(self.shapes[i] for i in chosen),
            self.dtype,
            tuple(self.strides[i] for i in chosen) if self.strides else (),
        )

    def wide(self) -> "BucketShape":
        """The same in float32, or wider where the elements are."""
        dtype = torch.promote_types(self.dtype, torch.float32)
        return BucketShape(self.names, self.shapes, dtype, self.strides)

    def shards(self, world_size: int) -> tuple["Shard", ...]:
        """The parts that the ranks own: rank r has [r n / W, (r + 1) n / W) of n elements."""
        return _shards(self.names, self.sizes, world_size)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Strides of a parameter's part of a bucket; see :func:`memory_order`."""
    if _is_dense(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


@dataclass
class Bucket:
    """What an aggregator works on."""

    shape: BucketShape
    flat: Tensor  # 1-D, contiguous; each parameter's part is in its memory order, as in DDP

    @classmethod
    def read(cls, shape: BucketShape, tensors: Mapping[str, Tensor]) -> "Bucket":
        """A copy of the values of some tensors, in the bucket's dtype."""
        device = tensors[shape.names[0]].device if shape.names else None
        bucket = cls(shape, torch.empty(shape.numel, dtype=shape.dtype, device=device))
        for name, view in bucket.tensors().items():
            view.copy_(tensors[name].detach())
        return bucket

    @torch.no_grad()
    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Give tensors the values of the bucket, rounded to their own dtypes."""
        for name, view in self.tensors().items():
            tensors[name].copy_(view)

    @property
    def names(self) -> Names:
        """Parameter names, in the order of their elements."""
        return self.shape.names

    def parts(self) -> dict[str, Tensor]:
        """Each parameter's part of `flat`, as a 1-D view."""
        parts = torch.split(self.flat, list(self.shape.sizes))
        return dict(zip(self.shape.names, parts, strict=True))

    def tensors(self) -> dict[str, Tensor]:
        """Each parameter's part of `flat`, as a view in the parameter's shape."""
        shape = self.shape
        if not shape.strides:
            each = zip(self.parts().items(), shape.shapes, strict=True)
            return {name: part.view(size) for (name, part), size in each}
        layouts = zip(self.parts().items(), shape.shapes, shape.strides, strict=True)
        return {
            name: part.as_strided(size, stride, part.storage_offset())
            for (name, part), size, stride in layouts
        }


@dataclass(frozen=True)
class Shard:
    """The contiguous part of a bucket that one rank owns."""

    start: int  # first element within the bucket
    stop: int  # one past the last element
    names: Names  # parameters that have elements in it, in order
    sizes: tuple[int, ...]  # how many elements of each
    offsets: tuple[int, ...]  # the first of them within each parameter

    @property
    def span(self) -> slice:
        """Its elements within the bucket."""
        return slice(self.start, self.stop)


@lru_cache(maxsize=1024)
def _shards(names: Names, sizes: tuple[int, ...], world_size: int) -> tuple[Shard, ...]:
    total = sum(sizes)
    cuts = [rank * total // world_size for rank in range(world_size + 1)]
    shards = []
    for start, stop in pairwise(cuts):
        held = []
        for name, size, end in zip(names, sizes, accumulate(sizes), strict=True):
            first, last = max(end - size, start), min(end, stop)
            if first < last:
                held.append((name, last - first, first - (end - size)))
        shards.append(Shard(start, stop, *(list(zip(*held, strict=True)) or [(), (), ()])))
    return tuple(shards)


@dataclass(frozen=True)
class Caps:
    """Sizes at which a group of parameters is closed, in bytes."""

    first: int = 1 * MIB  # small, so that communication starts early in the backward pass
    rest: int = 25 * MIB


def partition(parameters: Iterable[tuple[str, Tensor]], caps: Caps) -> tuple[Group, ...]:
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


def merge(groups: Iterable[Group], parameters: Mapping[str, Tensor]) -> tuple[Group, ...]:
    """One group of all parameters, or one for each dtype and device where there are several."""
    merged: dict[tuple[torch.dtype, torch.device], Group] = {}
    for group in groups:
        first = parameters[group[0]]
        kind = (first.dtype, first.device)
        merged[kind] = (*merged.get(kind, ()), *group)
    return tuple(merged.values())


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
