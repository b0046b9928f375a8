"""Checkpoint: the one form of all state dicts, and what it must say to be loaded.

A *form* is a function that takes a value and its path in a state dict, for the error. It raises
CheckpointError unless the value is what it should be. State dicts are checked as a whole before
anything changes.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from torchcomp.bucket import BucketShape, memory_order
from torchcomp.checks import is_number, is_whole
from torchcomp.errors import CheckpointError
from torchcomp.exchange import Exchange
from torchcomp.state import Kind, Slot

ONE_STEP = "Every rank loads its own state of one and the same step, or none does."
"""Advice for ranks that are not at the same step."""

VERSION = 3
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Form = Callable[[Any, str], None]


def _require(holds: bool, where: str, expected: str, value: object) -> None:
    if not holds:
        text = repr(value)
        short = text if len(text) <= 80 else f"{text[:80]}..."
        raise CheckpointError(f"a damaged checkpoint: {where} must be {expected}, not {short}")


def count(value: Any, where: str) -> None:
    """A whole number of at least 0."""
    _require(is_whole(value) and 0 <= value < 2**63, where, "a whole number of at least 0", value)


def number(value: Any, where: str) -> None:
    """A finite number."""
    _require(is_number(value), where, "a finite number", value)


def loss_scale(value: Any, where: str) -> None:
    """A loss scale: a number above 0 that float32 can hold."""
    holds = is_number(value) and 2.0**-126 <= value < 2.0**128
    _require(holds, where, "a number from 2^-126 to 2^128", value)


def text(value: Any, where: str) -> None:
    """A string."""
    _require(isinstance(value, str), where, "a text", value)


def flag(value: Any, where: str) -> None:
    """True or False."""
    _require(isinstance(value, bool), where, "True or False", value)


def optional(form: Form) -> Form:
    """None, or a value of the form."""

    def check_optional(value: Any, where: str) -> None:
        if value is not None:
            form(value, where)

    return check_optional


def list_of(form: Form, length: int | None = None) -> Form:
    """A list or tuple of values of the form, of a given length if there is one."""

    def check_list(value: Any, where: str) -> None:
        _require(isinstance(value, list | tuple), where, "a list", value)
        if length is not None:
            _require(len(value) == length, where, f"a list of {length} entries", value)
        for i, each in enumerate(value):
            form(each, f"{where}[{i}]")

    return check_list


def dict_of(form: Form, keys: Collection[str] | None = None) -> Form:
    """A dict from strings to values of the form, with exactly these keys if they are given."""

    def check_dict(value: Any, where: str) -> None:
        _require(isinstance(value, Mapping), where, "a dict", value)
        for key, each in value.items():
            _require(isinstance(key, str), where, "a dict with texts as keys", key)
            form(each, f"{where}['{key}']")
        missing = sorted(set(keys or value) - set(value))
        foreign = sorted(set(value) - set(keys if keys is not None else value))
        problems = {"lacks": missing, "holds the unknown": foreign}
        told = [f"{verb} {listed(found)}" for verb, found in problems.items() if found]
        if told:
            raise CheckpointError(f"a damaged checkpoint: {where} {' and '.join(told)}")

    return check_dict


def record(**forms: Form) -> Form:
    """A dict that holds at least these keys, each with a value of its form."""

    def check_record(value: Any, where: str) -> None:
        _require(isinstance(value, Mapping), where, "a dict", value)
        missing = [key for key in forms if key not in value]
        if missing:
            raise CheckpointError(f"a damaged checkpoint: {where} lacks {listed(missing)}")
        for key, form in forms.items():
            form(value[key], f"{where}.{key}")

    return check_record


def tensor(
    shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None, numel: int | None = None
) -> Form:
    """A dense tensor of finite real numbers, of this shape, dtype or size where they are given."""

    def check_tensor(value: Any, where: str) -> None:
        dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
        _require(dense, where, "a dense tensor", value)
        found = f"{value.dtype} of shape {tuple(value.shape)}"
        plain = not value.is_floating_point() or value.dtype in _FLOATS
        _require(plain and not value.is_complex(), where, "a tensor of real numbers", found)
        _require(shape in (None, tuple(value.shape)), where, f"a tensor of shape {shape}", found)
        _require(dtype in (None, value.dtype), where, f"a tensor of {dtype}", found)
        _require(numel in (None, value.numel()), where, f"a tensor of {numel} elements", found)
        if value.is_floating_point() and not value.isfinite().all():
            raise CheckpointError(f"a damaged checkpoint: {where} holds a NaN or an infinity")

    return check_tensor


def listed(names: list[str]) -> str:
    """Up to three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more


_HEADER = record(version=count, spec=text, rank=count, world_size=count)
_ENGINE = record(
    step=count,
    seed=count,
    scale=loss_scale,
    flushing=flag,
    groups=list_of(list_of(text)),
    buckets=list_of(list_of(text)),
    parameters=dict_of(dict_of(list_of(count), ("shape", "stride"))),
    traffic=dict_of(count, ("sent", "received", "dense")),
    slots=dict_of(record(kind=text, sharded=flag, tensors=dict_of(tensor()))),
)


def header(spec: str, exchange: Exchange) -> dict[str, Any]:
    """What identifies the run and the rank that a state dict belongs to."""
    place = {"rank": exchange.rank, "world_size": exchange.world_size}
    return {"version": VERSION, "spec": spec, **place}


def check_header(state: Any, spec: str, exchange: Exchange, advice: Mapping[str, str]) -> None:
    """Require a state dict of this version, method, rank and world size.

    Args:
        state: what the user wants to load.
        spec: the method or schedule that it must be of.
        exchange: the ranks of this run.
        advice: what to do about a "spec" or "world_size" that differs.

    Raises:
        CheckpointError: naming both values, and what to do.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"expected a state dict, not {type(state).__name__}")
    wanted = header(spec, exchange)
    missing = [name for name in wanted if name not in state]
    if missing:
        raise CheckpointError(f"not a state dict of torchcomp: it lacks {listed(missing)}")
    _HEADER(state, "the state dict")
    advice = {
        "version": "save it again with this version of torchcomp",
        "rank": "every rank loads what it saved itself",
        **advice,
    }
    for name in ("version", "spec", "world_size", "rank"):
        if state[name] != wanted[name]:
            raise CheckpointError(
                f"the checkpoint has {name} {state[name]!r}, and this run has {wanted[name]!r}: "
                f"{advice.get(name, '')}"
            )


def layout_of(parameters: Mapping[str, Tensor]) -> dict[str, dict[str, list[int]]]:
    """Shape and strides of each parameter by name, as a checkpoint holds them."""
    return {
        name: {"shape": list(parameter.shape), "stride": list(parameter.stride())}
        for name, parameter in parameters.items()
    }


def digest_of(tensors: Mapping[str, Tensor]) -> int:
    """A checksum of all values, to recognise them."""
    checksum = 0
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().view(-1)
        checksum = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def check_engine(state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
    """Require what an :class:`torchcomp.Averager` saves, of parameters of these names and shapes.

    Raises:
        CheckpointError: naming what is missing, unknown, damaged or of another shape.
    """
    _ENGINE(state, "the state dict")
    saved = {name: each["shape"] for name, each in state["parameters"].items()}
    here = {name: list(parameter.shape) for name, parameter in parameters.items()}
    problems = [f"'{name}' is not in the model" for name in saved if name not in here]
    problems += [f"'{name}' is not in the checkpoint" for name in here if name not in saved]
    problems += [
        f"'{name}' has shape {list(saved[name])} in the checkpoint and {here[name]} in the model"
        for name in here
        if name in saved and list(saved[name]) != here[name]
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"the checkpoint is another model's: {'; '.join(problems[:5])}{more}")
    for division in ("groups", "buckets"):
        _check_division(division, state, parameters)


def _check_division(
    division: str, state: Mapping[str, Any], parameters: Mapping[str, Any] | None = None
) -> None:
    """Require that the "groups" or "buckets" hold each parameter once.

    Args:
        division: which of the two.
        state: of the form that an Averager saves.
        parameters: the model's, if there is one; then each group has one dtype and device.
    """
    held = Counter(name for group in state[division] for name in group)
    expected = Counter(list(state["parameters"]))
    where = f"a damaged checkpoint: its {division} must hold"
    if held != expected:
        differing = listed([*(held - expected), *(expected - held)])
        raise CheckpointError(f"{where} every parameter once, and do not for {differing}")
    for group in state[division]:
        kinds = {(parameters[n].dtype, parameters[n].device) for n in group if parameters}
        if not group or len(kinds) > 1:
            raise CheckpointError(f"{where} parameters of one dtype and device each, not {group}")


def save_slot(
    slot: Slot, held: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Copies of what is held of a slot; first values where nothing is.

    What is kept for each element of a parameter is saved in the parameter's shape, so that it fits
    a model in another memory format; all else, such as a shard, as it lies.
    """
    saved = {}
    for name, size in zip(slot.names, slot.sizes, strict=True):
        parameter = parameters[name]
        part = held.get(name)
        if part is None or part.numel() != size:
            part = torch.zeros(size, dtype=slot.dtype, device=parameter.device)
            if slot.init is not None:
                slot.init(name, part)
        if size == parameter.numel() and not slot.sharded:
            part = memory_order(parameter, part)
        saved[name] = part.clone(memory_format=torch.contiguous_format)
    return saved


def load_slot(
    slot: Slot, state: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What :func:`save_slot` has saved, as flat tensors on the parameters' devices.

    Raises:
        CheckpointError: if the slot is missing, or holds other parameters or sizes.
    """
    saved = state["slots"].get(slot.name)
    where = f"slots['{slot.name}']"
    if saved is None:
        raise CheckpointError(f"a damaged checkpoint: {where} is missing")
    meant = (slot.kind.value, slot.sharded)
    _require((saved["kind"], saved["sharded"]) == meant, where, f"a slot {meant}", saved["kind"])
    flats = {}
    for name, size in zip(slot.names, slot.sizes, strict=True):
        if name not in saved["tensors"]:
            raise CheckpointError(f"a damaged checkpoint: {where} lacks '{name}'")
        value, parameter = saved["tensors"][name], parameters[name]
        path = f"{where}.tensors['{name}']"
        if slot.sharded and list(state["parameters"][name]["stride"]) != list(parameter.stride()):
            raise CheckpointError(
                f"'{name}' has strides {list(state['parameters'][name]['stride'])} in the "
                f"checkpoint and {list(parameter.stride())} in the model: bring the model into the "
                "memory format that it was saved in"
            )
        if slot.sharded and value.numel() != size:
            raise CheckpointError(
                f"the checkpoint holds {value.numel()} elements of the server residual of "
                f"'{name}', and this rank owns {size}: torchcomp.redistribute(states, world_size) "
                "divides it anew"
            )
        fits = value.dtype in (_FLOATS if slot.dtype in _FLOATS else (slot.dtype,))
        _require(fits, path, f"of {slot.dtype}", value.dtype)
        whole = size == parameter.numel() and not slot.sharded
        form = tensor(tuple(parameter.shape)) if whole else tensor(numel=size)
        form(value, path)
        flat = torch.empty(size, dtype=slot.dtype, device=parameter.device)
        place = memory_order(parameter, flat) if whole else flat
        place.copy_(value.detach() if whole else value.detach().reshape(-1))
        tensor()(flat, f"{path}, as {slot.dtype},")
        flats[name] = flat
    return flats


def redistribute(states: list[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """State dicts of all ranks of a run, made to fit another number of ranks.

    Every new rank gets the mean of the old residuals and estimates, so the mean residual, which is
    what error feedback has still to send, stays what it was. The server's residual is divided anew.

    Args:
        states: ``state_dict()`` of every rank's handle, Averager or JointSpar, or LocalSGD between
            rounds, in any order.
        world_size: number of ranks of the new run.

    Returns:
        One state dict for each new rank, in rank order.

    Raises:
        CheckpointError: if the states are not those of all ranks of one run at one step.
    """
    states = _complete(states, world_size)
    first, fresh = states[0], [dict[str, Any]() for _ in range(world_size)]
    for name, slot in first["slots"].items():
        if slot["kind"] == Kind.CACHE.value:
            continue
        tensors = [state["slots"][name]["tensors"] for state in states]
        divided = _redivided(first, tensors, world_size) if slot["sharded"] else [_mean(tensors)]
        for rank, slots in enumerate(fresh):
            own = divided[rank % len(divided)]
            slots[name] = {**slot, "tensors": {n: t.detach().clone() for n, t in own.items()}}
    return [
        {**first, "world_size": world_size, "rank": rank, "slots": slots}
        for rank, slots in enumerate(fresh)
    ]


def _mean(tensors: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: torch.stack([each[name].double() for each in tensors]).mean(0).to(value.dtype)
        for name, value in tensors[0].items()
    }


def _redivided(
    state: dict[str, Any], tensors: list[dict[str, Tensor]], world_size: int
) -> list[dict[str, Tensor]]:
    """What each of `world_size` owners holds, from what the old ones do, in rank order."""
    for rank, (each, owned) in enumerate(zip(tensors, _owned(state, len(tensors)), strict=True)):
        held = {name: part.numel() for name, part in each.items()}
        sizes = {name: size for name, (_, size) in owned.items()}
        _require(held == sizes, f"the server residual of rank {rank}", f"of sizes {sizes}", held)
    names = {name for each in tensors for name in each}
    whole = {
        name: torch.cat([each[name].reshape(-1) for each in tensors if name in each])
        for name in names
    }
    return [
        {name: whole[name][at : at + size] for name, (at, size) in owned.items()}
        for owned in _owned(state, world_size)
    ]


def _owned(state: dict[str, Any], world_size: int) -> list[dict[str, tuple[int, int]]]:
    """By owner, where its part of each parameter begins, and how many elements it has."""
    owners: list[dict[str, tuple[int, int]]] = [{} for _ in range(world_size)]
    for group in state["buckets"]:
        shapes = tuple(tuple(state["parameters"][name]["shape"]) for name in group)
        shards = BucketShape(tuple(group), shapes, torch.float32).shards(world_size)
        for owned, shard in zip(owners, shards, strict=True):
            places = zip(shard.offsets, shard.sizes, strict=True)
            owned |= dict(zip(shard.names, places, strict=True))
    return owners


def _complete(states: list[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """The states in rank order, if they are all of one run at one step."""
    if not is_whole(world_size) or world_size < 1:
        raise CheckpointError(f"world_size must be at least 1, not {world_size}")
    if not isinstance(states, list | tuple) or not states:
        raise CheckpointError("no states: give the state dicts of all ranks of the old run")
    for place, state in enumerate(states):
        _HEADER(state, f"states[{place}]")
        _ENGINE(state, f"states[{place}]")
    states = sorted(states, key=lambda state: state["rank"])
    ranks, size = [state["rank"] for state in states], states[0]["world_size"]
    if len(ranks) != size or ranks != list(range(size)):
        raise CheckpointError(f"need one state of each of {size} ranks, and got those of {ranks}")
    shared = ("version", "spec", "world_size", "step", "seed", "scale", "flushing")
    for name in (*shared, "parameters", "groups", "buckets"):
        if any(state[name] != states[0][name] for state in states):
            raise CheckpointError(f"the states are not of one run at one step: their {name} differ")
    _check_division("buckets", states[0])
    kinds = [_kinds(state) for state in states]
    if any(each != kinds[0] for each in kinds):
        raise CheckpointError("the states hold slots of different kinds or parameters")
    return states


def _kinds(state: Mapping[str, Any]) -> dict[str, Any]:
    """Kind of each slot, and of one that every rank holds whole, shapes and dtypes by parameter."""
    return {
        name: (
            slot["kind"],
            slot["sharded"],
            None
            if slot["sharded"] or slot["kind"] == Kind.CACHE.value
            else {n: (t.shape, t.dtype) for n, t in slot["tensors"].items()},
        )
        for name, slot in state["slots"].items()
    }
