"""Resume: save and restore an averager, and compare those of all ranks before the first step."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchcomp.aggregators import EF, Aggregator
from torchcomp.checkpoints import checkpoint
from torchcomp.checkpoints.checkpoint import FLOATS, RECUT, listed, require, tensor
from torchcomp.compressors import Identity
from torchcomp.engine.bucket import Group, memory_order
from torchcomp.engine.settlement import Steps
from torchcomp.engine.state import Kind, Slot, State
from torchcomp.exchange import Exchange
from torchcomp.kernels.backend import fast_form
from torchcomp.specs.errors import CheckpointError

FLUSH = EF(Identity())
"""Sends a residual that the next method has no slot for, usually in one step."""


class Resumable(Steps):
    """Steps of one method that can be saved and continued."""

    exchange: Exchange
    parameters: dict[str, Tensor]  # shapes, dtypes and devices of what is averaged
    groups: tuple[Group, ...]
    buckets: tuple[Group, ...]
    seed: int
    aggregator: Aggregator  # that the user chose
    flushing: bool = False  # whether the residual of another method is sent before

    @abstractmethod
    def settle(self) -> None: ...

    @abstractmethod
    def slots(
        self, method: Aggregator | None = None, buckets: Sequence[Group] | None = None
    ) -> Iterator[Slot]: ...

    @abstractmethod
    def _run(self, method: Aggregator) -> None: ...

    def _compare_ranks(self, lrs: Mapping[str, float]) -> None:
        """Raise RankMismatchError if the ranks differ in what must be the same."""
        state, exchange = self.state, self.exchange
        # The scale that the state has, before it follows that of this step.
        values = {"spec": self.aggregator, "step": self.step, "seed": self.seed}
        values |= {"groups": self.groups, "buckets": self.buckets, "flushing": self.flushing}
        values |= {"lr": lrs, "scale": self.units.scale, "checksum": exchange.checksum}
        # With other thresholds to start from, the ranks would run different collectives.
        found = [(name, t.tolist()) for name, t in state.items("thresholds")]
        slots = list(self.slots())
        names = {slot.name for slot in slots if slot.equal}
        equal = {f"{slot} {name}": part for slot in names for name, part in state.items(slot)}
        digest = checkpoint.digest_of(dict(sorted(equal.items())))
        if any(slot.name == "thresholds" for slot in slots):
            # The two forms of the search send different messages.
            devices = {parameter.device.type for parameter in self.parameters.values()}
            forms = [fast_form("counted", device) is not None for device in sorted(devices)]
            values["searches with Triton"] = forms
        on_level = {"thresholds": sorted(found), "checksum of equal slots": digest}
        exchange.verify("the first step", values, checkpoint.ONE_STEP, on_level)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: plain tensors, numbers and strings, keyed by parameter name.

        Every rank must save its own. ``torch.load(..., weights_only=True)`` can load it.
        """
        self.settle()
        with self._lock:
            return {
                **checkpoint.header(str(self.aggregator), self.exchange),
                "step": self.step,
                "seed": self.seed,
                "scale": self.units.scale,
                "lrs": dict(self.units.lrs),
                "flushing": self.flushing,
                "groups": [list(group) for group in self.groups],
                "buckets": [list(group) for group in self.buckets],
                "parameters": checkpoint.layout_of(self.parameters),
                "traffic": self.meter.state_dict(),
                "slots": save_slots(self.slots(), self.state, self.parameters),
            }

    def prepare(
        self,
        state: Any,
        advice: Mapping[str, str] = checkpoint.ADVICE,
        aggregator: Aggregator | None = None,
    ) -> Callable[[], None]:
        """Check a state dict of this rank, and return a function that restores it, with its groups.

        `aggregator` is the method of the state, if the run changes to it. Raises CheckpointError.
        """
        chosen = aggregator or self.aggregator
        checkpoint.check_header(state, str(chosen), self.exchange, advice)
        checkpoint.check_engine(state, self.parameters)
        groups, buckets = (tuple(map(tuple, state[name])) for name in ("groups", "buckets"))
        # During a flush, the checkpoint has the slots of FLUSH and the spec of the next method.
        method = FLUSH if state["flushing"] else chosen
        declared = self.slots(method, buckets)
        slots = load_slots(declared, state, self.parameters, str(chosen))

        def restore() -> None:
            # A step in flight must not outlive the state that it began with.
            self._discard()
            self._flushed = self._taken_back = self._verified = False
            self.state, self.step, self.steps_kept = State(self._lock), state["step"], 0
            for name, (kind, sharded, parts) in slots.items():
                self.state.load(name, kind, sharded, parts)
            self.seed = state["seed"]
            self.units.scale, self.units.lrs = float(state["scale"]), dict(state["lrs"])
            self.meter.load_state_dict(state["traffic"], self.step)
            self.groups, self.buckets = groups, buckets
            self.aggregator, self.flushing = chosen, state["flushing"]
            self._run(method)

        return restore

    def load_state_dict(self, state: dict[str, Any], aggregator: Aggregator | None = None) -> None:
        """Restore a state dict, or change nothing on error; see :meth:`prepare`."""
        restore = self.prepare(state, aggregator=aggregator)
        with self._lock:
            restore()


LoadedSlots = dict[str, tuple[Kind, bool, dict[str, Tensor]]]  # by slot: kind, sharded, values


def save_slots(
    slots: Iterable[Slot], state: State, parameters: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return copies of all slots: in the parameter's shape, for any memory format, or else 1-D."""
    saved: dict[str, Any] = {}
    for slot in slots:
        kind = {"kind": slot.kind.value, "sharded": slot.sharded}
        tensors = saved.setdefault(slot.name, {**kind, "tensors": {}})["tensors"]
        held = dict(state.items(slot.name))
        for name, size in zip(slot.names, slot.sizes, strict=True):
            parameter, part = parameters[name], held.get(name)
            if part is None or part.numel() != size:
                part = _initial(slot, name, size, parameter.device)
            if size == parameter.numel() and not slot.sharded:
                part = memory_order(parameter, part)
            # A copy: a view would be saved with its whole bucket, and change in the next step.
            tensors[name] = part.clone(memory_format=torch.contiguous_format)
    return saved


def _initial(slot: Slot, name: str, size: int, device: torch.device) -> Tensor:
    part = torch.zeros(size, dtype=slot.dtype, device=device)
    if slot.init is not None:
        slot.init(name, part)
    return part


def load_slots(
    slots: Iterable[Slot], state: Mapping[str, Any], parameters: Mapping[str, Tensor], spec: str
) -> LoadedSlots:
    """Return the values of exactly these slots from a state dict, or raise CheckpointError."""
    loaded: LoadedSlots = {}
    for slot in slots:
        # `redistribute` drops caches, so they can be missing. They never change a result.
        if slot.kind is not Kind.CACHE or slot.name in state["slots"]:
            parts = _load_slot(slot, state, parameters)
            loaded.setdefault(slot.name, (slot.kind, slot.sharded, {}))[2].update(parts)
    for name, saved in state["slots"].items():
        unknown = sorted(set(saved["tensors"]) - set(loaded[name][2] if name in loaded else ()))
        if unknown or name not in loaded:
            problem = f"slots['{name}'] has tensors that {spec} does not use: {listed(unknown)}"
            raise CheckpointError(f"a damaged checkpoint: {problem}")
    return loaded


def _load_slot(
    slot: Slot, state: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    saved, where = state["slots"].get(slot.name), f"slots['{slot.name}']"
    if saved is None:
        raise CheckpointError(f"a damaged checkpoint: {where} is missing")
    found, expected = (saved["kind"], saved["sharded"]), (slot.kind.value, slot.sharded)
    require(found == expected, where, f"a slot of (kind, sharded) {expected}", found)
    flats = {}
    for name, size in zip(slot.names, slot.sizes, strict=True):
        parameter, value = parameters[name], saved["tensors"].get(name)
        whole = size == parameter.numel() and not slot.sharded
        if value is None and state.get(RECUT) is True and not (whole or slot.sharded):
            flats[name] = _initial(slot, name, size, parameter.device)
            continue
        if value is None:
            raise CheckpointError(f"a damaged checkpoint: {where} lacks '{name}'")
        stride, here = list(state["parameters"][name]["stride"]), list(parameter.stride())
        # A shard is cut from the bucket, which has the memory order of the saved parameter.
        if slot.sharded and stride != here:
            raise CheckpointError(
                f"'{name}' has strides {stride} in the checkpoint and {here} in the model: "
                "convert the model to the memory format that it was saved in"
            )
        path = f"{where}.tensors['{name}']"
        # Any float will do: the model can be in another dtype than when it was saved.
        fits = value.dtype in (FLOATS if slot.dtype in FLOATS else (slot.dtype,))
        require(fits, path, f"of {slot.dtype}", value.dtype)
        form = tensor(tuple(parameter.shape)) if whole else tensor(numel=size)
        form(value, path)
        flat = torch.empty(size, dtype=slot.dtype, device=parameter.device)
        view = memory_order(parameter, flat) if whole else flat
        view.copy_(value.detach().reshape(view.shape))
        # Checked again: a large float64 value becomes an infinity in a narrower dtype.
        tensor()(flat, f"{path}, as {slot.dtype},")
        flats[name] = flat
    return flats
