"""Checkpoint: the common format of all state dicts, and its validation.

A *form* is a function that validates one value. Its arguments are the value and the path of the
value in the state dict, for the error message. It raises CheckpointError if the value is invalid.
A complete state dict is validated before anything is restored from it.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchcomp.bucket import BucketShape, memory_order
from torchcomp.checks import is_number, is_whole
from torchcomp.errors import CheckpointError
from torchcomp.exchange import Exchange
from torchcomp.state import Kind, Slot

ONE_STEP = "Load checkpoints of the same step on all ranks (each rank its own), or on none."
"""Advice for ranks that are not at the same step."""

VERSION = 5
"""Version of the format. A state dict of another version is refused."""

# Without the 8-bit floats: torch does not implement `isfinite` for them.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Form = Callable[[Any, str], None]


def _require(valid: bool, where: str, expected: str, value: object) -> None:
    if not valid:
        # Shortened: a damaged value can be of any size.
        text = repr(value)
        short = text if len(text) <= 80 else f"{text[:80]}..."
        raise CheckpointError(f"a damaged checkpoint: {where} must be {expected}, not {short}")


def count(value: Any, where: str) -> None:
    """Require an integer of at least 0 that fits into an int64."""
    valid = is_whole(value) and 0 <= value < 2**63
    _require(valid, where, "an integer from 0 to 2^63 - 1", value)


def number(value: Any, where: str) -> None:
    """Require a finite number."""
    _require(is_number(value), where, "a finite number", value)


def loss_scale(value: Any, where: str) -> None:
    """Require a loss scale: a positive number that float32 can represent."""
    # 2^-126 is the smallest normal number.
    valid = is_number(value) and 2.0**-126 <= value < 2.0**128
    _require(valid, where, "a number from 2^-126 to 2^128", value)


def learning_rate(value: Any, where: str) -> None:
    """Require a positive learning rate."""
    _require(is_number(value) and value > 0, where, "a finite number above 0", value)


def text(value: Any, where: str) -> None:
    """Require a string."""
    _require(isinstance(value, str), where, "a string", value)


def flag(value: Any, where: str) -> None:
    """Require True or False."""
    _require(isinstance(value, bool), where, "True or False", value)


def optional(form: Form) -> Form:
    """Return a form that accepts None and any value of `form`."""

    def check_optional(value: Any, where: str) -> None:
        if value is not None:
            form(value, where)

    return check_optional


def list_of(form: Form, length: int | None = None) -> Form:
    """Return a form for lists and tuples whose entries have the form `form`.

    If `length` is not None, the list must have that length.
    """

    def check_list(value: Any, where: str) -> None:
        _require(isinstance(value, list | tuple), where, "a list", value)
        if length is not None:
            _require(len(value) == length, where, f"a list of {length} entries", value)
        for i, each in enumerate(value):
            form(each, f"{where}[{i}]")

    return check_list


def dict_of(form: Form, keys: Collection[str] | None = None) -> Form:
    """Return a form for dicts with strings as keys and values of the form `form`.

    If `keys` is not None, the dict must have exactly these keys.
    """

    def check_dict(value: Any, where: str) -> None:
        _require(isinstance(value, Mapping), where, "a dict", value)
        for key, each in value.items():
            _require(isinstance(key, str), where, "a dict with strings as keys", key)
            form(each, f"{where}['{key}']")
        missing = sorted(set(keys or value) - set(value))
        unknown = sorted(set(value) - set(keys if keys is not None else value))
        problems = {"lacks": missing, "has the unknown keys": unknown}
        found = [f"{verb} {listed(names)}" for verb, names in problems.items() if names]
        if found:
            raise CheckpointError(f"a damaged checkpoint: {where} {' and '.join(found)}")

    return check_dict


def record(**forms: Form) -> Form:
    """Return a form for dicts that have at least these keys, each with a value of its form."""

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
    """Return a form for dense tensors of finite real numbers.

    If `shape`, `dtype` or `numel` is not None, the tensor must have it.
    """

    def check_tensor(value: Any, where: str) -> None:
        dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
        _require(dense, where, "a dense tensor", value)
        # Describes the tensor in errors. Its `repr` would print elements and wait for the device.
        found = f"{value.dtype} of shape {tuple(value.shape)}"
        plain = not value.is_floating_point() or value.dtype in _FLOATS
        _require(plain and not value.is_complex(), where, "a tensor of real numbers", found)
        _require(shape in (None, tuple(value.shape)), where, f"a tensor of shape {shape}", found)
        _require(dtype in (None, value.dtype), where, f"a tensor of {dtype}", found)
        _require(numel in (None, value.numel()), where, f"a tensor of {numel} elements", found)
        # A residual with a NaN would make every later step non-finite.
        if value.is_floating_point() and not value.isfinite().all():
            raise CheckpointError(f"a damaged checkpoint: {where} contains a NaN or an infinity")

    return check_tensor


def listed(names: list[str]) -> str:
    """Return the first three names, and the number of the others, as text."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more


# What every state dict has, and what an Averager adds. Both accept further keys: LocalSGD and other
# clients add a section, which they validate themselves.
_HEADER = record(version=count, spec=text, rank=count, world_size=count)
_ENGINE = record(
    step=count,
    seed=count,
    scale=loss_scale,
    lrs=dict_of(learning_rate),
    flushing=flag,
    groups=list_of(list_of(text)),
    buckets=list_of(list_of(text)),
    parameters=dict_of(dict_of(list_of(count), ("shape", "stride"))),
    traffic=dict_of(count, ("sent", "received", "dense", "control", "inside")),
    slots=dict_of(record(kind=text, sharded=flag, tensors=dict_of(tensor()))),
)
_GATHERED = record(version=count, states=list_of(record(version=count)))


def header(spec: str, exchange: Exchange) -> dict[str, Any]:
    """Return the entries that identify the run and the rank of a state dict."""
    ranks = {"rank": exchange.rank, "world_size": exchange.world_size}
    return {"version": VERSION, "spec": spec, **ranks}


def check_header(state: Any, spec: str, exchange: Exchange, advice: Mapping[str, str]) -> None:
    """Require a state dict of this version, method, rank and world size.

    Args:
        state: the value that the user passed to ``load_state_dict``.
        spec: the expected method or schedule.
        exchange: the collectives of this run, for its rank and world size.
        advice: what to do if "spec" or "world_size" differs, for the error message.

    Raises:
        CheckpointError: if one of them differs. The message has both values and the advice.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"expected a state dict, not {type(state).__name__}")
    wanted = header(spec, exchange)
    if "states" in state:
        raise CheckpointError(
            "this checkpoint has the states of all ranks, from gather_state_dict(): pass it to "
            "load_gathered(state)"
        )
    missing = [name for name in wanted if name not in state]
    if missing:
        raise CheckpointError(f"not a state dict of torchcomp: it lacks {listed(missing)}")
    _HEADER(state, "the state dict")
    advice = {
        "version": "load it with the version of torchcomp that saved it",
        "rank": "each rank must load the state that it saved itself. Where one rank writes for all "
        "(Lightning, Accelerate, Fabric, Ray), save torchcomp.Gathered(handle) instead of the "
        "handle. With torch.distributed.checkpoint, save it under another name on each rank: "
        "dcp.save({f'handle{rank}': handle})",
        **advice,
    }
    # Version first: another version's other entries can have another meaning. World size before
    # rank: another world size explains another rank.
    for name in ("version", "spec", "world_size", "rank"):
        if state[name] != wanted[name]:
            raise CheckpointError(
                f"the checkpoint has {name} {state[name]!r}, but this run has {wanted[name]!r}: "
                f"{advice.get(name, '')}"
            )


def layout_of(parameters: Mapping[str, Tensor]) -> dict[str, dict[str, list[int]]]:
    """Return the shape and strides of each parameter by name, as stored in a checkpoint."""
    return {
        name: {"shape": list(parameter.shape), "stride": list(parameter.stride())}
        for name, parameter in parameters.items()
    }


def digest_of(tensors: Mapping[str, Tensor]) -> int:
    """Return a checksum of all values, to verify that they are equal elsewhere."""
    checksum = 0
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().view(-1)
        # By bytes: NumPy has no bfloat16.
        checksum = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def check_engine(state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
    """Require the state of a :class:`torchcomp.Averager` with parameters of these names and shapes.

    Raises:
        CheckpointError: if an entry or a parameter is missing, unknown, damaged or of another
            shape. The message has its name.
    """
    _ENGINE(state, "the state dict")
    # Strides can differ. Only shards depend on them; see `load_slot`.
    saved = {name: each["shape"] for name, each in state["parameters"].items()}
    here = {name: list(parameter.shape) for name, parameter in parameters.items()}
    # All differences together: one name would not show that the whole model is another one.
    problems = [f"'{name}' is not in the model" for name in saved if name not in here]
    problems += [f"'{name}' is not in the checkpoint" for name in here if name not in saved]
    problems += [
        f"'{name}' has shape {list(saved[name])} in the checkpoint and {here[name]} in the model"
        for name in here
        if name in saved and list(saved[name]) != here[name]
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"a checkpoint of another model: {'; '.join(problems[:5])}{more}")
    for division in ("groups", "buckets"):
        _check_division(division, state, parameters)


def _check_division(
    division: str, state: Mapping[str, Any], parameters: Mapping[str, Any] | None = None
) -> None:
    """Require that each parameter is in exactly one of the "groups", or of the "buckets".

    Args:
        division: "groups" or "buckets".
        state: the state of an Averager.
        parameters: the parameters of the model. If not None, each group must also have one dtype
            and device.
    """
    # Counted, to find a parameter that is in two groups.
    saved = Counter(name for group in state[division] for name in group)
    expected = Counter(list(state["parameters"]))
    where = f"a damaged checkpoint: its {division} must contain"
    if saved != expected:
        differing = listed([*(saved - expected), *(expected - saved)])
        raise CheckpointError(f"{where} each parameter once, but do not for {differing}")
    for group in state[division]:
        kinds = {(parameters[n].dtype, parameters[n].device) for n in group if parameters}
        if not group or len(kinds) > 1:
            raise CheckpointError(f"{where} parameters of one dtype and device each, not {group}")


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
        parameter = parameters[name]
        part = held.get(name)
        # What `State.open` would start with: no step has opened the slot, or the size has changed.
        if part is None or part.numel() != size:
            part = torch.zeros(size, dtype=slot.dtype, device=parameter.device)
            if slot.init is not None:
                slot.init(name, part)
        if size == parameter.numel() and not slot.sharded:
            part = memory_order(parameter, part)
        # A copy: the state changes in the next step, and a view would be saved with its whole
        # bucket.
        saved[name] = part.clone(memory_format=torch.contiguous_format)
    return saved


def load_slot(
    slot: Slot, state: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of :func:`save_slot`, as flat tensors on the parameters' devices.

    Raises:
        CheckpointError: if the slot is missing, or has other parameters or sizes.
    """
    saved = state["slots"].get(slot.name)
    where = f"slots['{slot.name}']"
    if saved is None:
        raise CheckpointError(f"a damaged checkpoint: {where} is missing")
    found, expected = (saved["kind"], saved["sharded"]), (slot.kind.value, slot.sharded)
    _require(found == expected, where, f"a slot of (kind, sharded) {expected}", found)
    flats = {}
    for name, size in zip(slot.names, slot.sizes, strict=True):
        if name not in saved["tensors"]:
            raise CheckpointError(f"a damaged checkpoint: {where} lacks '{name}'")
        value, parameter = saved["tensors"][name], parameters[name]
        path = f"{where}.tensors['{name}']"
        # A shard is cut from the bucket, which has the memory order of the saved parameter.
        if slot.sharded and list(state["parameters"][name]["stride"]) != list(parameter.stride()):
            raise CheckpointError(
                f"'{name}' has strides {list(state['parameters'][name]['stride'])} in the "
                f"checkpoint and {list(parameter.stride())} in the model: convert the model to the "
                "memory format that it was saved in"
            )
        if slot.sharded and value.numel() != size:
            raise CheckpointError(
                f"the checkpoint has {value.numel()} elements of the server residual of '{name}', "
                f"but this rank owns {size}: convert all ranks' state dicts with "
                "torchcomp.redistribute(states, world_size)"
            )
        # Any float will do: the model can be in another dtype than when it was saved.
        fits = value.dtype in (_FLOATS if slot.dtype in _FLOATS else (slot.dtype,))
        _require(fits, path, f"of {slot.dtype}", value.dtype)
        whole = size == parameter.numel() and not slot.sharded
        form = tensor(tuple(parameter.shape)) if whole else tensor(numel=size)
        form(value, path)
        flat = torch.empty(size, dtype=slot.dtype, device=parameter.device)
        view = memory_order(parameter, flat) if whole else flat
        view.copy_(value.detach() if whole else value.detach().reshape(-1))
        # Checked again: a large float64 value becomes an infinity in a narrower dtype.
        tensor()(flat, f"{path}, as {slot.dtype},")
        flats[name] = flat
    return flats


def redistribute(states: list[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Convert the state dicts of all ranks of a run to another number of ranks.

    Every new rank gets the mean of the old residuals and estimates. The mean residual over the
    ranks, which error feedback has not sent yet, is therefore unchanged. The server residual is
    split into new shards.

    Args:
        states: the ``state_dict()`` of every rank's handle, Averager or JointSpar, or of every
            rank's LocalSGD between rounds, in any order.
        world_size: number of ranks of the new run.

    Returns:
        One state dict for each new rank, in rank order.

    Raises:
        CheckpointError: if the states are not those of all ranks of one run at one step.
    """
    return _redistributed(states, world_size, range(world_size))


def gathered(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one state dict that contains the state dicts of all ranks, in rank order."""
    return {"version": VERSION, "states": states}


def own_state(state: Any, exchange: Exchange) -> dict[str, Any]:
    """Return this rank's part of a :func:`gathered` state dict.

    If the run has another number of ranks, the part comes from :func:`redistribute`. The caller
    still has to check the header: this function does not know the method.

    Raises:
        CheckpointError: if the state is not a gathered one, or cannot be redistributed.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"expected the result of gather_state_dict(), not {type(state).__name__}: on other "
            "ranks than dst it is None, so save it on rank dst, and load that file on all ranks"
        )
    if "states" not in state and "rank" in state:
        raise CheckpointError(
            f"this checkpoint has only the state of rank {state['rank']}, from state_dict(): pass "
            "it to load_state_dict(state) on that rank, or save gather_state_dict() instead"
        )
    _GATHERED(state, "the gathered state dict")
    states: list[dict[str, Any]] = list(state["states"])
    if len(states) == exchange.world_size:
        return states[exchange.rank]
    (own,) = _redistributed(states, exchange.world_size, [exchange.rank])
    return own


def _redistributed(
    states: list[dict[str, Any]], world_size: int, ranks: Iterable[int]
) -> list[dict[str, Any]]:
    """Return what :func:`redistribute` does, but only for the new `ranks`."""
    states = _complete(states, world_size)
    first, fresh = states[0], {rank: dict[str, Any]() for rank in ranks}
    for name, slot in first["slots"].items():
        # A cache never changes a result, so a new run can do without it.
        if slot["kind"] == Kind.CACHE.value:
            continue
        tensors = [state["slots"][name]["tensors"] for state in states]
        split = _resharded(first, tensors, world_size) if slot["sharded"] else [_mean(tensors)]
        for rank, slots in fresh.items():
            # One entry per rank, or one mean for all ranks. Cloned, so that they share no memory.
            own = split[rank % len(split)]
            slots[name] = {**slot, "tensors": {n: t.detach().clone() for n, t in own.items()}}
    # All other entries of an Averager are equal on all ranks, except for the traffic counters. Of
    # those, and of the clients' sections, rank 0's are kept.
    return [
        {**first, "world_size": world_size, "rank": rank, "slots": slots}
        for rank, slots in fresh.items()
    ]


def _mean(tensors: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    # In float64: the sum of 16-bit residuals can exceed their range.
    return {
        name: torch.stack([each[name].double() for each in tensors]).mean(0).to(value.dtype)
        for name, value in tensors[0].items()
    }


def _resharded(
    state: dict[str, Any], tensors: list[dict[str, Tensor]], world_size: int
) -> list[dict[str, Tensor]]:
    """Split a sharded slot of all old ranks into shards for `world_size` ranks, in rank order."""
    for rank, (each, owned) in enumerate(zip(tensors, _owned(state, len(tensors)), strict=True)):
        saved = {name: part.numel() for name, part in each.items()}
        sizes = {name: size for name, (_, size) in owned.items()}
        _require(saved == sizes, f"the server residual of rank {rank}", f"of sizes {sizes}", saved)
    # A shard is a contiguous part of a bucket. In rank order, the shards' parts of a parameter
    # therefore join to the whole parameter.
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
    """Return, for each rank, the offset and size of its part of each parameter."""
    owners: list[dict[str, tuple[int, int]]] = [{} for _ in range(world_size)]
    for group in state["buckets"]:
        shapes = tuple(tuple(state["parameters"][name]["shape"]) for name in group)
        # Shards do not depend on the dtype.
        shards = BucketShape(tuple(group), shapes, torch.float32).shards(world_size)
        for owned, shard in zip(owners, shards, strict=True):
            extents = zip(shard.offsets, shard.sizes, strict=True)
            owned |= dict(zip(shard.names, extents, strict=True))
    return owners


def _complete(states: list[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Return the states in rank order. Require all ranks of one run at one step."""
    if not is_whole(world_size) or world_size < 1:
        raise CheckpointError(f"world_size must be at least 1, not {world_size}")
    if not isinstance(states, list | tuple) or not states:
        raise CheckpointError("states must be a non-empty list of the state dicts of all ranks")
    for i, state in enumerate(states):
        _HEADER(state, f"states[{i}]")
        _ENGINE(state, f"states[{i}]")
    states = sorted(states, key=lambda state: state["rank"])
    ranks, size = [state["rank"] for state in states], states[0]["world_size"]
    # The length first: a damaged world size must not make `range` huge.
    if len(ranks) != size or ranks != list(range(size)):
        raise CheckpointError(f"expected one state of each of {size} ranks, not of ranks {ranks}")
    shared = ("version", "spec", "world_size", "step", "seed", "scale", "lrs", "flushing")
    for name in (*shared, "parameters", "groups", "buckets"):
        if any(state[name] != states[0][name] for state in states):
            raise CheckpointError(f"the states are not of one run at one step: {name} differs")
    _check_division("buckets", states[0])
    kinds = [_kinds(state) for state in states]
    if any(each != kinds[0] for each in kinds):
        raise CheckpointError("the states have slots of different kinds or parameters")
    return states


def _kinds(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must match on all ranks, by slot.

    That is the kind and whether the slot is sharded. Unless it is sharded or a cache, the shape and
    dtype of each tensor must match as well.
    """
    return {
        name: (
            slot["kind"],
            slot["sharded"],
            # A shard has other parameters and sizes on each rank, and a cache is dropped.
            None
            if slot["sharded"] or slot["kind"] == Kind.CACHE.value
            else {n: (t.shape, t.dtype) for n, t in slot["tensors"].items()},
        )
        for name, slot in state["slots"].items()
    }
