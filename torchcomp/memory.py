"""ErrorMemory: what was not sent yet, kept by parameter name.

DDP numbers its buckets anew after the first iteration, parameter ids differ between processes, and
a checkpoint may come from a run with other bucket sizes. Names are what stays.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from torchcomp.bucket import Bucket

Names = tuple[str, ...]


class ErrorMemory:
    """Per-parameter memory, laid out flat for each bucket that asks for it.

    There are two copies of each flat: the memory as it was before the step, and the memory after
    it. :meth:`commit` makes the second current, :meth:`rollback` forgets it, so a step that turns
    out to be unusable on some rank leaves no trace.
    """

    def __init__(self) -> None:
        self._current: dict[Names, Bucket] = {}
        self._next: dict[Names, Tensor] = {}
        self._loose: dict[str, Tensor] = {}
        self._touched: set[Names] = set()

    def open(self, bucket: Bucket, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The bucket's memory before this step, and the place for the memory after it.

        Args:
            bucket: whose layout and device the memory takes.
            dtype: dtype of the memory; one that exists in another dtype is converted.

        Returns:
            Two 1-D tensors in the bucket's order; only the second may be written.
        """
        held = self._current.get(bucket.names)
        if held is None or held.flat.dtype != dtype:
            self._lay_out(bucket, dtype)
        self._touched.add(bucket.names)
        return self._current[bucket.names].flat, self._next[bucket.names]

    def commit(self) -> None:
        """The step counts: what it wrote is now the memory."""
        for names in self._touched:
            held = self._current[names]
            held.flat, self._next[names] = self._next[names], held.flat
        self._touched.clear()

    def rollback(self) -> None:
        """The step does not count: the memory is what it was before it."""
        self._touched.clear()

    def keep(self, names: Iterable[str]) -> None:
        """Undo the step in flight for some parameters: their memory stays what it was."""
        wanted = set(names)
        before = {
            name: part for held in self._current.values() for name, part in held.parts().items()
        }
        for name, after in self.pending():
            if name in wanted:
                after.copy_(before[name])

    def pending(self) -> Iterator[tuple[str, Tensor]]:
        """Name and 1-D memory (a view) of each parameter, as the step in flight has left it."""
        for names in self._touched:
            held = self._current[names]
            yield from Bucket(names, held.sizes, self._next[names]).parts().items()

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Name and 1-D memory (a view) of each parameter that has one."""
        for held in self._current.values():
            yield from held.parts().items()
        yield from self._loose.items()

    def load(self, parts: dict[str, Tensor]) -> None:
        """Replace everything by `parts`: name -> 1-D tensor, owned by the memory from now on."""
        self.clear()
        self._loose.update(parts)

    def clear(self) -> None:
        """Forget everything."""
        self._current.clear()
        self._next.clear()
        self._loose.clear()
        self._touched.clear()

    def scale(self, factor: float) -> None:
        """Multiply all memory by `factor`."""
        for _, part in self.items():
            part.mul_(factor)

    def _lay_out(self, bucket: Bucket, dtype: torch.dtype) -> None:
        self._loosen(set(bucket.names))
        flat = torch.zeros(bucket.flat.numel(), dtype=dtype, device=bucket.flat.device)
        for name, place in zip(bucket.names, torch.split(flat, list(bucket.sizes)), strict=True):
            if name in self._loose:
                place.copy_(self._loose.pop(name))
        self._current[bucket.names] = Bucket(bucket.names, bucket.sizes, flat)
        self._next[bucket.names] = torch.empty_like(flat)

    def _loosen(self, wanted: set[str]) -> None:
        for names in [names for names in self._current if not wanted.isdisjoint(names)]:
            self._loose.update(self._current.pop(names).parts())
            del self._next[names]
            self._touched.discard(names)
