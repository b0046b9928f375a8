"""State: what an aggregator keeps from step to step, at both ends of an exchange."""

from collections.abc import Iterable, Mapping

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
        self._agreed_before: dict[tuple[str, ...], dict[int, int]] = {}

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

    def load_agreed(self, names: tuple[str, ...], thresholds: Mapping[int, int]) -> None:
        """Take over what the owners had agreed on for a bucket, of a step that counted."""
        self._agreed[names] = dict(thresholds)
        self._agreed_before[names] = dict(thresholds)

    def commit(self) -> None:
        """The step counts."""
        self.worker.commit()
        self.owner.commit()
        self._agreed_before = _copied(self._agreed)

    def rollback(self) -> None:
        """The step does not count: the memories and thresholds are what they were before it.

        A rank that missed the end of the agreement would else start the next one from elsewhere.
        """
        self.worker.rollback()
        self.owner.rollback()
        self._agreed = _copied(self._agreed_before)

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
        self._agreed_before.clear()


def _copied(
    thresholds: Mapping[tuple[str, ...], dict[int, int]],
) -> dict[tuple[str, ...], dict[int, int]]:
    return {names: dict(own) for names, own in thresholds.items()}
