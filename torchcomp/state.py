"""State: what an aggregator keeps from step to step, at both ends of an exchange."""

from collections.abc import Iterable

from torchcomp.bucket import Shard
from torchcomp.kernels.select import Warm
from torchcomp.memory import ErrorMemory


class State:
    """The error memories of a rank, and what speeds its next selection up.

    Attributes:
        worker: what this rank did not send of its own gradients; all parameters.
        owner: what it did not send back of the means that it owns; its shard of each bucket.
    """

    def __init__(self) -> None:
        self.worker = ErrorMemory()
        self.owner = ErrorMemory()
        self._warm: dict[tuple[str, tuple[str, ...]], list[Warm]] = {}
        self._agreed: dict[tuple[str, ...], dict[int, int]] = {}

    def warm(self, role: str, names: tuple[str, ...], count: int) -> list[Warm]:
        """What the last selections from the `count` vectors of a bucket left for the next ones."""
        kept = self._warm.get((role, names))
        if kept is None or len(kept) != count:
            kept = self._warm[role, names] = [Warm() for _ in range(count)]
        return kept

    def agreed(self, names: tuple[str, ...]) -> dict[int, int]:
        """By vector of a bucket, the threshold that the owners agreed on last; the caller's to set.

        The same on all ranks.
        """
        return self._agreed.setdefault(names, {})

    def commit(self) -> None:
        """The step counts."""
        self.worker.commit()
        self.owner.commit()

    def rollback(self) -> None:
        """The step does not count: both memories are what they were before it."""
        self.worker.rollback()
        self.owner.rollback()

    def keep(self, names: Iterable[str]) -> None:
        """Undo the step in flight for some parameters, at both ends."""
        wanted = set(names)
        self.worker.keep(wanted)
        self.owner.keep(wanted)

    def settle(self, owned: Iterable[Shard], world_size: int) -> None:
        """Hand what this rank owes as an owner to itself as a worker, and owe nothing.

        An owner's memory is part of the mean, a worker's enters it divided by the number of ranks.

        Args:
            owned: this rank's shard of each bucket.
            world_size: number of ranks.
        """
        debts = dict(self.owner.items())
        kept = dict(self.worker.items())
        for shard in owned:
            for name, offset, size in zip(shard.names, shard.offsets, shard.sizes, strict=True):
                if name in debts:
                    place = kept[name][offset : offset + size]
                    place.add_(debts[name].to(place.dtype), alpha=world_size)
        self.owner.clear()

    def scale(self, factor: float) -> None:
        """Multiply all memory by `factor`."""
        self.worker.scale(factor)
        self.owner.scale(factor)

    def clear(self) -> None:
        """Forget everything."""
        self.worker.clear()
        self.owner.clear()
        self._warm.clear()
        self._agreed.clear()
