"""State: what must survive from step to step, in named slots and by parameter name.

DDP numbers its buckets anew after the first iteration, parameter ids differ between processes, and
a checkpoint may come from a run with other buckets. Names are what stays.

Every slot has two copies: the values before the step in flight, and those after it. A commit makes
the second current; a roll-back forgets it, so a step that cannot be used leaves no trace.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import torch
from torch import Tensor

from torchcomp.bucket import Names, Shard

Made = TypeVar("Made")
Init = Callable[[str, Tensor], None]


class Kind(Enum):
    """What a slot means, and so what becomes of it.

    * A *debt* is gradient that was not sent yet. A swap of methods sends what the next method does
      not take up, and another number of ranks shares it out, so that its mean stays.
    * An *estimate* is what a method has learned of the gradients. A swap drops it; another number
      of ranks takes its mean.
    * A *cache* saves work and never changes a result. Both drop it.

    Debts and estimates are in the unit of the gradients, so they follow a loss scale.
    """

    DEBT = "debt"
    ESTIMATE = "estimate"
    CACHE = "cache"


@dataclass(frozen=True)
class Slot:
    """What is kept under one name for the parameters of one bucket."""

    name: str
    kind: Kind
    names: Names  # of the parameters
    sizes: tuple[int, ...]  # number of elements that are kept for each of them
    dtype: torch.dtype
    sharded: bool = False  # whether each rank keeps the elements of its own shard alone
    # Writes a parameter's first values, given its name. By default they are zeros.
    init: Init | None = field(default=None, compare=False, repr=False)

    @property
    def numel(self) -> int:
        """Number of elements in all."""
        return sum(self.sizes)


class _Flat:
    """Both copies of a slot, for the parameters of one bucket."""

    def __init__(self, slot: Slot, device: torch.device) -> None:
        self.slot = slot
        self.before = torch.zeros(slot.numel, dtype=slot.dtype, device=device)
        self.after = torch.empty_like(self.before)

    def parts(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        return zip(self.slot.names, torch.split(flat, list(self.slot.sizes)), strict=True)


@dataclass
class _Store:
    """All that is kept under one slot's name: laid out for buckets, or loose, by parameter."""

    kind: Kind
    sharded: bool
    flats: dict[Names, _Flat] = field(default_factory=dict)
    loose: dict[str, Tensor] = field(default_factory=dict)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        for flat in self.flats.values():
            yield from flat.parts(flat.before)
        yield from self.loose.items()


class State:
    """The slots of one rank."""

    def __init__(self) -> None:
        self._stores: dict[str, _Store] = {}
        self._in_flight: set[_Flat] = set()
        self._scratch: dict[object, object] = {}

    def open(self, slot: Slot, device: torch.device) -> tuple[Tensor, Tensor]:
        """The slot before this step, and the place for the slot after it.

        Args:
            slot: what is kept. Values in another dtype are converted; a parameter whose size has
                changed begins anew.
            device: where it is kept.

        Returns:
            Two 1-D tensors in the slot's order. Only the second may be written, and all of it is.
        """
        store = self._stores.get(slot.name)
        if store is None:
            store = self._stores[slot.name] = _Store(slot.kind, slot.sharded)
        flat = store.flats.get(slot.names)
        if flat is None or (flat.slot is not slot and flat.slot != slot):
            flat = self._lay_out(store, slot, device)
        self._in_flight.add(flat)
        return flat.before, flat.after

    def commit(self) -> None:
        """The step counts: what it wrote is current now."""
        for flat in self._in_flight:
            flat.before, flat.after = flat.after, flat.before
        self._in_flight.clear()

    def rollback(self) -> None:
        """The step does not count: everything is what it was before it."""
        self._in_flight.clear()

    def keep(self, names: Iterable[str]) -> None:
        """Undo the step in flight for some parameters: what is kept of them stays what it was."""
        wanted = set(names)
        for flat in self._in_flight:
            if flat.slot.kind is not Kind.CACHE and not wanted.isdisjoint(flat.slot.names):
                before = dict(flat.parts(flat.before))
                for name, after in flat.parts(flat.after):
                    if name in wanted:
                        after.copy_(before[name])

    def scratch(self, key: object, make: Callable[[], Made]) -> Made:
        """Work space that lasts from step to step but never changes a result, made when missing."""
        held = self._scratch.get(key)
        if held is None:
            held = self._scratch[key] = make()
        return held  # type: ignore[return-value]

    def items(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Parameter and 1-D values (a view) of all that a slot holds."""
        if name in self._stores:
            yield from self._stores[name].items()

    def pending(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The same, as the step in flight has left it."""
        for flat in self._in_flight:
            if flat.slot.name == name:
                yield from flat.parts(flat.after)

    def slots(self) -> dict[str, tuple[Kind, bool]]:
        """Kind of every slot that holds something, and whether it is sharded."""
        return {name: (store.kind, store.sharded) for name, store in self._stores.items()}

    def debts(self) -> set[str]:
        """Names of the slots that hold gradient which was not sent yet."""
        return {name for name, store in self._stores.items() if store.kind is Kind.DEBT}

    def load(self, name: str, kind: Kind, sharded: bool, parts: dict[str, Tensor]) -> None:
        """Replace a slot by `parts`: parameter -> 1-D tensor, owned by the state from now on."""
        self.drop([name])
        self._stores[name] = _Store(kind, sharded, loose=parts)

    def drop(self, names: Iterable[str]) -> None:
        """Forget some slots."""
        for name in names:
            store = self._stores.pop(name, None)
            if store is not None:
                self._in_flight -= set(store.flats.values())

    def unshard(self, owned: Iterable[Shard], world_size: int) -> None:
        """Hand the server's residual to this rank's own: what it holds of its shards.

        The server's is part of the mean; a rank's own enters it divided by the number of ranks.

        Args:
            owned: this rank's shard of each bucket.
            world_size: number of ranks.
        """
        sharded = [name for name in self.debts() if self._stores[name].sharded]
        own = dict(self.items("error"))
        for debt in sharded:
            held = dict(self.items(debt))
            for shard in owned:
                for name, at, size in zip(shard.names, shard.offsets, shard.sizes, strict=True):
                    if name in held:
                        part = own[name][at : at + size]
                        part.add_(held[name].to(part.dtype), alpha=world_size)
        self.drop(sharded)

    def scale(self, factor: float) -> None:
        """Multiply all debts and estimates by `factor`."""
        for store in self._stores.values():
            if store.kind is not Kind.CACHE:
                for _, part in store.items():
                    part.mul_(factor)

    def _lay_out(self, store: _Store, slot: Slot, device: torch.device) -> _Flat:
        for names in [names for names in store.flats if not set(slot.names).isdisjoint(names)]:
            loosened = store.flats.pop(names)
            self._in_flight.discard(loosened)
            store.loose.update(loosened.parts(loosened.before))
        flat = store.flats[slot.names] = _Flat(slot, device)
        for name, place in flat.parts(flat.before):
            held = store.loose.pop(name, None)
            if held is not None and held.numel() == place.numel():
                place.copy_(held)
            elif slot.init is not None:
                slot.init(name, place)
        return flat
