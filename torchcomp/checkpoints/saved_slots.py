"""Slots in a checkpoint: save them, and load them into a model of another dtype or layout."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchcomp.checkpoints.checkpoint import FLOATS, RECUT, listed, require, tensor
from torchcomp.engine.bucket import memory_order
from torchcomp.engine.state import Kind, Slot, State
from torchcomp.specs.errors import CheckpointError

LoadedSlots = Mapping[str, tuple[Kind, bool, dict[str, Tensor]]]
"""By name of the slot: its kind, whether it is sharded, and its values by parameter name."""


def save_slot(
    slot: Slot, held: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return copies of the values of a slot, or its initial values where there are none.

    If a slot has one value per element of a parameter, it is saved in the parameter's shape. It can
    then be loaded into a model in another memory format. Other values, such as those of a shard,
    are saved as 1-D tensors.
    """
    saved = {}
    for name, size in zip(slot.names, slot.sizes, strict=True):
        parameter, part = parameters[name], held.get(name)
        # What `State.open` would start with: no step has opened the slot, or the size has changed.
        if part is None or part.numel() != size:
            part = _initial(slot, name, size, parameter.device)
        if size == parameter.numel() and not slot.sharded:
            part = memory_order(parameter, part)
        # A copy: the state changes in the next step, and a view would be saved with its whole
        # bucket.
        saved[name] = part.clone(memory_format=torch.contiguous_format)
    return saved


def _initial(slot: Slot, name: str, size: int, device: torch.device) -> Tensor:
    """Return the values that a slot of this parameter begins with: 1-D."""
    part = torch.zeros(size, dtype=slot.dtype, device=device)
    if slot.init is not None:
        slot.init(name, part)
    return part


def save_slots(
    slots: Iterable[Slot], state: State, parameters: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return all slots of a state, as stored in a checkpoint."""
    saved: dict[str, Any] = {}
    for slot in slots:
        entry: dict[str, Any] = {"kind": slot.kind.value, "sharded": slot.sharded, "tensors": {}}
        tensors = save_slot(slot, dict(state.items(slot.name)), parameters)
        saved.setdefault(slot.name, entry)["tensors"] |= tensors
    return saved


def load_slots(
    slots: Iterable[Slot], state: Mapping[str, Any], parameters: Mapping[str, Tensor], spec: str
) -> LoadedSlots:
    """Return the values of all slots from a state dict; see :func:`load_slot`.

    Raises:
        CheckpointError: if one is damaged, or not one of `slots`.
    """
    loaded: dict[str, tuple[Kind, bool, dict[str, Tensor]]] = {}
    for slot in slots:
        # `redistribute` drops caches, so they can be missing. They never change a result.
        if slot.kind is not Kind.CACHE or slot.name in state["slots"]:
            parts = load_slot(slot, state, parameters)
            loaded.setdefault(slot.name, (slot.kind, slot.sharded, {}))[2].update(parts)
    for name, saved in state["slots"].items():
        unknown = sorted(set(saved["tensors"]) - set(loaded[name][2] if name in loaded else ()))
        if unknown or name not in loaded:
            raise CheckpointError(
                f"a damaged checkpoint: slots['{name}'] has tensors that {spec} does not use: "
                f"{listed(unknown)}"
            )
    return loaded


def load_slot(
    slot: Slot, state: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of :func:`save_slot`, as flat tensors on the parameters' devices.

    Raises:
        CheckpointError: if the slot is missing, or has other parameters or sizes.
    """
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
        if slot.sharded and value.numel() != size:
            raise CheckpointError(
                f"the checkpoint has {value.numel()} elements of the server residual of '{name}', "
                f"but this rank owns {size}: convert all ranks' state dicts with "
                "torchcomp.redistribute(states, world_size)"
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
