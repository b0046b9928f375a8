"""State: the values that a method keeps between steps, in named slots and by parameter name.

Names are the only keys that DDP's rebuilt buckets, other processes and checkpoints share.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from torchcomp.engine import host
from torchcomp.engine.bucket import Names, Shard
from torchcomp.exchange import Exchange
from torchcomp.kernels.swap import swap_where
from torchcomp.specs.checks import check_at_least_0


class Kind(Enum):
    """The kind of a slot: what a swap, other ranks, and other units do to its values."""

    # Unsent gradient: a swap to a method without the slot sends it first. In the unit of the
    # gradients, or of the update: the learning rate times the gradient.
    DEBT = "debt"
    # One of the gradients, in their unit, such as a momentum: such a swap drops it.
    ESTIMATE = "estimate"
    # Saves work, and never changes a result. Another number of ranks drops it.
    CACHE = "cache"


@dataclass(frozen=True)
class Slot:
    """What a slot stores for the parameters of one bucket."""

    name: str
    kind: Kind
    names: Names  # parameter names
    sizes: tuple[int, ...]  # number of elements that are stored for each parameter
    dtype: torch.dtype
    sharded: bool = False  # whether each rank stores only the elements of its own shard
    equal: bool = False  # whether all ranks store the same values, which is then verified
    # init(name, out) writes the initial values of a parameter to `out`. The default is zeros.
    # Not compared, because each declaration can make a new closure.
    init: Callable[[str, Tensor], None] | None = field(default=None, compare=False, repr=False)

    @property
    def numel(self) -> int:
        return sum(self.sizes)


@dataclass(eq=False)
class _Flat:
    slot: Slot
    before: Tensor
    after: Tensor

    def parts(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        return zip(self.slot.names, torch.split(flat, list(self.slot.sizes)), strict=True)


@dataclass
class _Store:
    kind: Kind
    sharded: bool
    flats: dict[Names, _Flat] = field(default_factory=dict)
    loose: dict[str, Tensor] = field(default_factory=dict)
    # The values before several steps that count or not together, which can differ in buckets.
    kept: dict[str, Tensor] = field(default_factory=dict)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        for flat in self.flats.values():
            yield from flat.parts(flat.before)
        yield from self.loose.items()


class State:
    """The slots of one rank: of each, the values before the step in flight, and those after it.

    The lock is held while a slot is laid out: other threads may read.
    """

    def __init__(self, lock: AbstractContextManager[Any] | None = None) -> None:
        self._lock = lock or nullcontext()
        self._stores: dict[str, _Store] = {}
        self._in_flight: set[_Flat] = set()
        self._committed: set[_Flat] = set()  # by the last commit

    def open(self, slot: Slot, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the values of a slot before this step, and a tensor for those after it."""
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
        """Undo the last commit if `void`, a scalar bool on the device, is true."""
        for flat in self._committed:
            # A cache can be on the CPU. It never changes a result.
            if flat.before.device == void.device:
                swap_where(void, flat.before, flat.after)

    def rollback(self) -> None:
        # It committed nothing, so `revert` must not undo an older commit instead.
        self._committed, self._in_flight = set(), set()

    def undo(self, names: Iterable[str]) -> None:
        """Undo the step in flight for some parameters, except in caches."""
        wanted = set(names)
        for flat in self._in_flight:
            if flat.slot.kind is not Kind.CACHE and not wanted.isdisjoint(flat.slot.names):
                # Copied back, because `commit` swaps whole buckets.
                both = zip(flat.parts(flat.before), flat.parts(flat.after), strict=True)
                for (name, before), (_, after) in both:
                    if name in wanted:
                        after.copy_(before)

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
        for store in self._stores.values():
            store.kept.clear()

    def items(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the current values of a slot: parameter names and 1-D views."""
        if name in self._stores:
            yield from self._stores[name].items()

    def pending(self, name: str, undone: bool = False) -> Iterator[tuple[str, Tensor]]:
        """As :meth:`items`: what the step in flight has written, or what a revert has undone."""
        for flat in self._committed if undone else self._in_flight:
            if flat.slot.name == name:
                yield from flat.parts(flat.after)

    def in_flight(self, slot: Slot) -> tuple[Tensor, Tensor] | None:
        """Return what :meth:`open` returned in this step, if the step has opened the slot."""
        store = self._stores.get(slot.name)
        flat = None if store is None else store.flats.get(slot.names)
        return (flat.before, flat.after) if flat in self._in_flight else None

    def debts(self) -> set[str]:
        return {name for name, store in self._stores.items() if store.kind is Kind.DEBT}

    def keep(self, names: Iterable[str]) -> None:
        """Remove all slots but these, and but debts, which are to be sent first."""
        self.drop(self._stores.keys() - self.debts() - set(names))

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

    def unshard(self, owned: Iterable[Shard], world_size: int, pending: bool = False) -> None:
        """Add this rank's server residual, of the shards in `owned`, to its own; then remove it.

        With `pending`, in what the step in flight has written: zeros are then left.
        """
        for debt in [name for name in self.debts() if self._stores[name].sharded]:
            read = self.pending if pending else self.items
            own, server = dict(read("error")), dict(read(debt))
            _add_shards(own, server, owned, world_size)
            if pending:
                for part in server.values():
                    part.zero_()
            else:
                _add_shards(self._stores["error"].kept, self._stores[debt].kept, owned, world_size)
                self.drop([debt])

    def scale_debts(self, factors: Mapping[str, float]) -> None:
        """Multiply the debts of each parameter by its factor, the ratio of two learning rates."""
        self.multiply({Kind.DEBT}, factors.get)

    def multiply(self, kinds: set[Kind], factor_of: Callable[[str], float | None]) -> None:
        # One launch for each dtype, device and factor: mixed lists are scaled one by one.
        alike: dict[tuple[torch.dtype, torch.device, float], list[Tensor]] = {}
        for store in self._stores.values():
            for name, part in (*store.items(), *store.kept.items()) if store.kind in kinds else ():
                factor = factor_of(name)
                if factor is not None:
                    alike.setdefault((part.dtype, part.device, factor), []).append(part)
        for (_, _, factor), parts in alike.items():
            torch._foreach_mul_(parts, factor)

    def _lay_out(self, store: _Store, slot: Slot, device: torch.device) -> _Flat:
        # A parameter is in one bucket at a time: dissolve the old ones, and their step in flight.
        for names in [names for names in store.flats if not set(slot.names).isdisjoint(names)]:
            old = store.flats.pop(names)
            self._in_flight.discard(old)
            self._committed.discard(old)
            store.loose.update(old.parts(old.before))
        before = torch.zeros(slot.numel, dtype=slot.dtype, device=device)
        # Not initialised: an aggregator writes all of it, or the step raises and is rolled back.
        flat = store.flats[slot.names] = _Flat(slot, before, torch.empty_like(before))
        for name, view in flat.parts(before):
            values = store.loose.pop(name, None)
            if values is not None and values.numel() == view.numel():
                view.copy_(values)
                # Loaded values were allocated on another stream, and are freed now.
                host.keep_for_this_stream(values)
            elif slot.init is not None:
                slot.init(name, view)
        return flat


def _add_shards(
    own: dict[str, Tensor], server: dict[str, Tensor], owned: Iterable[Shard], world_size: int
) -> None:
    for shard in owned:
        for name, at, size in zip(shard.names, shard.offsets, shard.sizes, strict=True):
            if name in server:
                part = own[name][at : at + size]
                # The server residual is a part of the mean, and a rank's own of the sum.
                part.add_(server[name].to(part.dtype), alpha=world_size)


# --- The units of a state, and what becomes of a residual in its last step ------------------------

LR = float | Mapping[str, float] | None
"""Learning rate of a step: one for all parameters, or one by name. None: not given."""


class Units:
    """The units in which a state is kept: the loss scale, and maybe the learning rates."""

    def __init__(self) -> None:
        self.scale = 1.0  # loss scale of the gradients
        # The learning rates in the residual, by parameter name: its unit is then that of an update.
        self.lrs: dict[str, float] = {}
        self.before = self.scale, self.lrs  # before the step in flight, or before the last one

    def follow(
        self, state: State, scale: float, lrs: Mapping[str, float], names: Iterable[str]
    ) -> Mapping[str, float]:
        """Convert a state to the units of the step that begins, maybe without learning rates.

        Return the factors by which the residual of each of the `names` has changed, if any has.
        """
        ratio = scale / self.scale
        self.rescale(state, scale)
        changed = self._follow_lrs(state, lrs) if lrs or self.lrs else {}
        if ratio == 1:
            return changed
        return {name: ratio * changed.get(name, 1.0) for name in names}

    def go_back(self, state: State) -> None:
        """Convert a state to the units :attr:`before`."""
        scale, lrs = self.before
        self.rescale(state, scale)
        self._follow_lrs(state, lrs)
        self.lrs = lrs

    def rescale(self, state: State, scale: float) -> None:
        """Convert residuals and estimates, which have the unit of the scaled gradients."""
        if scale != self.scale:
            ratio, self.scale = scale / self.scale, scale
            state.multiply({Kind.DEBT, Kind.ESTIMATE}, lambda name: ratio)

    def _follow_lrs(self, state: State, lrs: Mapping[str, float]) -> Mapping[str, float]:
        nonzero = {name: lr for name, lr in lrs.items() if lr}
        ratios = {name: self.lrs.get(name, lr) / lr for name, lr in nonzero.items()}
        changed = {name: ratio for name, ratio in ratios.items() if ratio != 1}
        if changed:
            state.scale_debts(changed)
        # Without learning rates, what is unsent comes from steps whose learning rate is not known.
        self.lrs = self.lrs | nonzero if lrs else {}
        return changed


def by_name(lr: float | Mapping[str, float], parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the learning rate of each parameter."""
    lrs = lr if isinstance(lr, Mapping) else dict.fromkeys(parameters, lr)
    for name in parameters:
        check_at_least_0(f"lr of '{name}'", lrs.get(name))
    return {name: float(lrs[name]) for name in parameters}


def is_sent(state: State, exchange: Exchange, parameters: Mapping[str, Tensor]) -> bool:
    """Whether the step in flight sends the whole residual, on every rank, but for rounding errors.

    These are dropped.
    """
    after = dict(state.pending("error"))
    left = torch.zeros((), dtype=torch.bool, device=exchange.device)
    for name, before in state.items("error"):
        part, numbers = after.get(name, before), torch.finfo(parameters[name].dtype)
        # A part that did not change was not sent: no rank had a gradient for it. A part above any
        # rounding error was clipped to the range of the gradients' dtype.
        kept = (part == before).all() | (part.abs() > numbers.eps * numbers.max).any()
        part.masked_fill_(~kept, 0.0)
        left |= part.any().to(left.device)
    # All ranks must agree, or they would run different methods from the next step on.
    return not exchange.all_reduce_max(left.to(torch.uint8).reshape(1)).any()


def hand_over(
    state: State, exchange: Exchange, names: Iterable[str], owned: Iterable[Shard], leaving: bool
) -> None:
    """Add the residuals of the ranks that leave to those of the others, in equal parts.

    All ranks make this call before they commit the step. `owned` has this rank's shards.
    """
    if leaving:
        state.unshard(owned, exchange.world_size, pending=True)
    after = dict(state.pending("error"))
    parts = [after[name] for name in names if name in after]
    wide = reduce(torch.promote_types, (part.dtype for part in parts), torch.float32)
    # The last element counts the ranks that leave.
    one = torch.ones(1, dtype=wide, device=exchange.device)
    given = torch.cat([*(part.to(wide) for part in parts), one])
    if not leaving:
        given.zero_()
    exchange.all_reduce(given)
    *received, leavers = torch.split(given, [*(part.numel() for part in parts), 1])
    staying = exchange.world_size - round(float(leavers))
    for part, more in zip(parts, received, strict=True) if staying else ():
        if leaving:
            part.zero_()
        else:
            part.add_(more.to(part.dtype), alpha=1 / staying)
