"""State: the values that a method keeps between steps, in named slots and by parameter name.

Parameter names are the only stable keys. DDP renumbers its buckets after the first iteration,
parameter ids differ between processes, and a checkpoint can come from a run with other buckets.

Every slot has two copies: its values before the step in flight, and its values after that step. A
commit makes the second copy current. A roll-back discards it, so a discarded step changes nothing.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.bucket import Names, Shard
from torchcomp.kernels.swap import swap_where

Init = Callable[[str, Tensor], None]


class Kind(Enum):
    """The kind of a slot, which determines what a swap or a new number of ranks does to its values.

    * A *debt* is unsent gradient, such as the residual of error feedback. When methods are swapped,
      it is sent if the next method has no slot for it. When the number of ranks changes, every rank
      gets the mean, which keeps the mean over the ranks unchanged.
    * An *estimate* is an estimate of the gradients, such as a momentum. A swap drops it unless the
      next method has the slot as well. When the number of ranks changes, every rank gets the mean.
    * A *cache* saves work and never changes a result. A swap treats it like an estimate. A change
      of the number of ranks drops it.

    The values of a sharded slot are split into new shards when the number of ranks changes. Debts
    and estimates are in the unit of the gradients, so they are rescaled with the loss scale. Debts
    can be in the unit of the update instead, the learning rate times the gradient.
    """

    DEBT = "debt"
    ESTIMATE = "estimate"
    CACHE = "cache"


@dataclass(frozen=True)
class Slot:
    """The description of the values that a slot stores for the parameters of one bucket."""

    name: str
    kind: Kind
    names: Names  # parameter names
    sizes: tuple[int, ...]  # number of elements that are stored for each parameter
    dtype: torch.dtype
    sharded: bool = False  # whether each rank stores only the elements of its own shard
    equal: bool = False  # whether all ranks store the same values, which is then verified
    # init(name, out) writes the initial values of a parameter to `out`. The default is zeros.
    # Not compared, because each declaration can make a new closure.
    init: Init | None = field(default=None, compare=False, repr=False)

    @property
    def numel(self) -> int:
        """Total number of elements."""
        return sum(self.sizes)


class _Flat:
    """Both copies of the values of a slot, for the parameters of one bucket."""

    def __init__(self, slot: Slot, device: torch.device) -> None:
        self.slot = slot
        self.before = torch.zeros(slot.numel, dtype=slot.dtype, device=device)
        # Not initialised: an aggregator writes all of it, or the step raises and is rolled back.
        self.after = torch.empty_like(self.before)

    def parts(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        return zip(self.slot.names, torch.split(flat, list(self.slot.sizes)), strict=True)


@dataclass
class _Store:
    """All values of one slot.

    They are stored in the layout of a bucket or, until a bucket needs them, by parameter.
    """

    kind: Kind
    sharded: bool
    flats: dict[Names, _Flat] = field(default_factory=dict)
    loose: dict[str, Tensor] = field(default_factory=dict)
    # The values before several steps that count or not together; see `State.restore_before`. By
    # parameter, because such steps can have different buckets.
    kept: dict[str, Tensor] = field(default_factory=dict)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        for flat in self.flats.values():
            yield from flat.parts(flat.before)
        yield from self.loose.items()

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over the same values and those that are kept, as few tensors as possible."""
        yield from (flat.before for flat in self.flats.values())
        yield from self.loose.values()
        yield from self.kept.values()


class State:
    """The slots of one rank.

    Args:
        lock: held while a slot is laid out, for a thread that reads values during a step.
    """

    def __init__(self, lock: AbstractContextManager[Any] | None = None) -> None:
        self._lock = lock or threading.RLock()
        self._stores: dict[str, _Store] = {}
        self._in_flight: set[_Flat] = set()
        self._committed: set[_Flat] = set()  # by the last commit

    def open(self, slot: Slot, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the values of a slot before this step, and a tensor for those after it.

        Args:
            slot: the description of the slot. Values in another dtype are converted. A parameter
                whose size has changed gets its initial values.
            device: the device of the values.

        Returns:
            Two 1-D tensors in the slot's order. The caller must write all of the second one, and
            must not write the first.
        """
        with self._lock:
            store = self._stores.get(slot.name)
            if store is None:
                store = self._stores[slot.name] = _Store(slot.kind, slot.sharded)
            flat = store.flats.get(slot.names)
            # `is not` first: comparing two slots compares hundreds of names, at every step.
            if flat is None or (flat.slot is not slot and flat.slot != slot):
                flat = self._lay_out(store, slot, device)
            self._in_flight.add(flat)
            return flat.before, flat.after

    def commit(self) -> None:
        """Make the values that the step wrote the current ones."""
        # Swapped, not copied: a copy would read and write every residual once more.
        for flat in self._in_flight:
            flat.before, flat.after = flat.after, flat.before
        self._committed, self._in_flight = self._in_flight, set()

    def revert(self) -> None:
        """Undo the last commit, before anything else was opened or changed."""
        for flat in self._committed:
            flat.before, flat.after = flat.after, flat.before
        self._committed = set()

    def revert_where(self, void: Tensor) -> None:
        """Undo the last commit if `void`, a scalar bool on the device, is true.

        The host does not wait. A second call cancels the first.
        """
        for flat in self._committed:
            # A cache can be on the CPU. It never changes a result.
            if flat.before.device == void.device:
                swap_where(void, flat.before, flat.after)

    def undone(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the values of a slot that :meth:`revert_where` has put aside."""
        for flat in self._committed:
            if flat.slot.name == name:
                yield from flat.parts(flat.after)

    def keep_before(self) -> None:
        """Keep the values from before the last commit, for :meth:`restore_before`."""
        for store in self._stores.values():
            for flat in self._committed.intersection(store.flats.values()):
                if not store.kept.keys() >= set(flat.slot.names):
                    # The next step writes where these values are.
                    store.kept = dict(flat.parts(flat.after.clone())) | store.kept

    def restore_before(self) -> None:
        """Go back to the values of the first :meth:`keep_before` since they were forgotten."""
        for store in self._stores.values():
            for name, values in store.items():
                kept = store.kept.get(name)
                # As in `open`, a parameter whose size has changed does not get its old values.
                if kept is not None and kept.numel() == values.numel():
                    values.copy_(kept)
        self.forget_before()

    def forget_before(self) -> None:
        """Free the values that :meth:`keep_before` has kept."""
        for store in self._stores.values():
            store.kept.clear()

    def rollback(self) -> None:
        """Discard the values that the step wrote."""
        self._in_flight.clear()
        # It committed nothing, so `revert` must not undo an older commit instead.
        self._committed = set()

    def undo(self, names: Iterable[str]) -> None:
        """Undo the step in flight for some parameters, except in caches."""
        wanted = set(names)
        for flat in self._in_flight:
            if flat.slot.kind is not Kind.CACHE and not wanted.isdisjoint(flat.slot.names):
                # Copied back, because `commit` swaps whole buckets.
                before = dict(flat.parts(flat.before))
                for name, after in flat.parts(flat.after):
                    if name in wanted:
                        after.copy_(before[name])

    def items(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Iterate over a slot: parameter name and 1-D values (a view)."""
        if name in self._stores:
            yield from self._stores[name].items()

    def pending(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the values that the step in flight has written; see :meth:`items`."""
        for flat in self._in_flight:
            if flat.slot.name == name:
                yield from flat.parts(flat.after)

    def in_flight(self, slot: Slot) -> tuple[Tensor, Tensor] | None:
        """Return the values of a slot before and after the step in flight; see :meth:`open`.

        None if the step has not opened it.
        """
        store = self._stores.get(slot.name)
        flat = None if store is None else store.flats.get(slot.names)
        return (flat.before, flat.after) if flat in self._in_flight else None

    def slots(self) -> dict[str, tuple[Kind, bool]]:
        """Return the kind of every slot, and whether it is sharded."""
        return {name: (store.kind, store.sharded) for name, store in self._stores.items()}

    def debts(self) -> set[str]:
        """Return the names of the slots that store unsent gradient."""
        return {name for name, store in self._stores.items() if store.kind is Kind.DEBT}

    def load(self, name: str, kind: Kind, sharded: bool, parts: dict[str, Tensor]) -> None:
        """Replace a slot with `parts`: parameter name -> 1-D tensor, which the state then owns."""
        self.drop([name])
        self._stores[name] = _Store(kind, sharded, loose=parts)

    def drop(self, names: Iterable[str]) -> None:
        """Remove slots, including what the step in flight wrote to them."""
        for name in names:
            store = self._stores.pop(name, None)
            if store is not None:
                self._in_flight.difference_update(store.flats.values())
                self._committed.difference_update(store.flats.values())

    def unshard(self, owned: Iterable[Shard], world_size: int) -> None:
        """Add this rank's server residual to its own residual, and remove the server residual.

        Args:
            owned: this rank's shard of each bucket.
            world_size: number of ranks.
        """
        sharded = self._sharded_debts()
        for debt in sharded:
            _add_shards(dict(self.items("error")), dict(self.items(debt)), owned, world_size)
            _add_shards(self._kept("error"), self._kept(debt), owned, world_size)
        self.drop(sharded)

    def unshard_pending(self, owned: Iterable[Shard], world_size: int) -> None:
        """As :meth:`unshard`, for what the step in flight has written. Zeros are left."""
        for debt in self._sharded_debts():
            server = dict(self.pending(debt))
            _add_shards(dict(self.pending("error")), server, owned, world_size)
            for part in server.values():
                part.zero_()

    def _kept(self, name: str) -> dict[str, Tensor]:
        return self._stores[name].kept if name in self._stores else {}

    def _sharded_debts(self) -> list[str]:
        return [name for name in self.debts() if self._stores[name].sharded]

    def scale(self, factor: float) -> None:
        """Multiply all debts and estimates by `factor`, the ratio of two loss scales."""
        stores = [store for store in self._stores.values() if store.kind is not Kind.CACHE]
        _multiply((values, factor) for store in stores for values in store.tensors())

    def scale_debts(self, factors: Mapping[str, float]) -> None:
        """Multiply the debts of each parameter by its factor, the ratio of two learning rates.

        Args:
            factors: by parameter name. The debts of other parameters do not change.
        """
        stores = [store for store in self._stores.values() if store.kind is Kind.DEBT]
        parts = (part for store in stores for part in (*store.items(), *store.kept.items()))
        _multiply((part, factors[name]) for name, part in parts if name in factors)

    def _lay_out(self, store: _Store, slot: Slot, device: torch.device) -> _Flat:
        """Move the values of a slot into the layout of a new bucket."""
        # A parameter is in one bucket at a time: dissolve every old bucket that shares one with
        # the new bucket. Its step in flight is discarded, as `before` is the committed copy.
        for names in [names for names in store.flats if not set(slot.names).isdisjoint(names)]:
            old = store.flats.pop(names)
            self._in_flight.discard(old)
            self._committed.discard(old)
            store.loose.update(old.parts(old.before))
        flat = store.flats[slot.names] = _Flat(slot, device)
        for name, view in flat.parts(flat.before):
            values = store.loose.pop(name, None)
            if values is not None and values.numel() == view.numel():
                view.copy_(values)
                # Loaded values were allocated on another stream than the one of the exchange, which
                # reads them here, and are freed now.
                host.keep_for_this_stream(values)
            elif slot.init is not None:
                slot.init(name, view)
        return flat


def _add_shards(
    own: Mapping[str, Tensor],
    server: Mapping[str, Tensor],
    owned: Iterable[Shard],
    world_size: int,
) -> None:
    """Add a rank's server residual to its own residual, both by parameter name."""
    for shard in owned:
        for name, at, size in zip(shard.names, shard.offsets, shard.sizes, strict=True):
            if name in server:
                part = own[name][at : at + size]
                # The server residual is a part of the mean. A rank's own residual enters the mean
                # divided by the number of ranks, so multiply by that number.
                part.add_(server[name].to(part.dtype), alpha=world_size)


def _multiply(factors: Iterable[tuple[Tensor, float]]) -> None:
    """Multiply each tensor by its factor, in place."""
    # One launch for each dtype, device and factor: mixed lists are scaled one by one.
    alike: dict[tuple[torch.dtype, torch.device, float], list[Tensor]] = {}
    for values, factor in factors:
        alike.setdefault((values.dtype, values.device, factor), []).append(values)
    for (_, _, factor), tensors in alike.items():
        torch._foreach_mul_(tensors, factor)
