"""Checkpoint: the common format of all state dicts, validated before anything is restored."""

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchcomp.exchange import Exchange
from torchcomp.specs.checks import is_number, shown
from torchcomp.specs.errors import CheckpointError

ONE_STEP = "Load checkpoints of the same step on all ranks (each rank its own), or on none."
ADVICE = {
    "spec": "build the method of the checkpoint, load, then swap to the new method",
    "world_size": "convert all ranks' state dicts with torchcomp.redistribute(states, world_size)",
}
"""What to do if the spec or the number of ranks of a checkpoint is another one."""

VERSION = 5  # of the format

# Without the 8-bit floats: torch does not implement `isfinite` for them.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Form = Callable[[Any, str], None]  # of a value and its path; raises CheckpointError


def require(valid: bool, where: str, expected: str, value: object) -> None:
    """Raise CheckpointError unless `valid`: `where` must be what is `expected`, not `value`."""
    if not valid:
        text = shown(value)  # a damaged value can be of any size
        short = text if len(text) <= 80 else f"{text[:80]}..."
        raise CheckpointError(f"a damaged checkpoint: {where} must be {expected}, not {short}")


def _form(expected: str, valid: Callable[[Any], bool]) -> Form:
    return lambda value, where: require(valid(value), where, expected, value)


def _is_plain_number(value: Any) -> bool:
    return type(value) in (int, float) and is_number(value)


# Python's own types only: torch.load(weights_only=True) refuses those of NumPy and subclasses.
count = _form("an integer from 0 to 2^63 - 1", lambda x: type(x) is int and 0 <= x < 2**63)
number = _form("a finite number", _is_plain_number)
# Above 0, and a normal number of float32.
loss_scale = _form(
    "a number from 2^-126 to 2^128", lambda x: _is_plain_number(x) and 2.0**-126 <= x < 2.0**128
)
learning_rate = _form("a finite number above 0", lambda x: _is_plain_number(x) and x > 0)
text = _form("a string", lambda x: type(x) is str)
flag = _form("True or False", lambda x: isinstance(x, bool))
content = _form("bytes", lambda x: type(x) is bytes)


def optional(form: Form) -> Form:
    """Accept None as well."""
    return lambda value, where: None if value is None else form(value, where)


def list_of(form: Form, length: int | None = None) -> Form:
    """Lists and tuples of `form`."""

    def check_list(value: Any, where: str) -> None:
        require(isinstance(value, list | tuple), where, "a list", value)
        if length is not None:
            require(len(value) == length, where, f"a list of {length} entries", value)
        for i, each in enumerate(value):
            form(each, f"{where}[{i}]")

    return check_list


def dict_of(form: Form, keys: Collection[str] | None = None) -> Form:
    """Dicts of strings, exactly `keys` unless it is None, to values of `form`."""

    def check_dict(value: Any, where: str) -> None:
        _require_keys(value, where, keys or ())
        for key, each in value.items():
            require(type(key) is str, where, "a dict with strings as keys", key)
            form(each, f"{where}['{key}']")
        unknown = sorted(set(value) - set(value if keys is None else keys))
        require(not unknown, where, f"without the unknown keys {listed(unknown)}", sorted(value))

    return check_dict


def record(**forms: Form) -> Form:
    """Dicts that have at least these keys, each with a value of its form."""

    def check_record(value: Any, where: str) -> None:
        _require_keys(value, where, forms)
        for key, form in forms.items():
            form(value[key], f"{where}.{key}")

    return check_record


def _require_keys(value: Mapping[str, Any], where: str, keys: Collection[str]) -> None:
    require(isinstance(value, Mapping), where, "a dict", value)
    if missing := [key for key in keys if key not in value]:
        raise CheckpointError(f"a damaged checkpoint: {where} lacks {listed(missing)}")


def tensor(
    shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None, numel: int | None = None
) -> Form:
    """Dense tensors of finite real numbers, with what is not None."""

    def check_tensor(value: Any, where: str) -> None:
        require(_is_dense(value), where, "a dense tensor", value)
        found = f"{value.dtype} of shape {tuple(value.shape)}"
        plain = not value.is_floating_point() or value.dtype in FLOATS
        require(plain and not value.is_complex(), where, "a tensor of real numbers", found)
        require(shape in (None, tuple(value.shape)), where, f"a tensor of shape {shape}", found)
        require(dtype in (None, value.dtype), where, f"a tensor of {dtype}", found)
        require(numel in (None, value.numel()), where, f"a tensor of {numel} elements", found)
        # A residual with a NaN would make every later step non-finite.
        if value.is_floating_point() and not value.isfinite().all():
            raise CheckpointError(f"a damaged checkpoint: {where} contains a NaN or an infinity")

    return check_tensor


def _is_dense(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    if value.is_meta or value.is_nested or value.is_quantized:
        return False
    # A few bytes can expand to a tensor of any size, which no later check could read.
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def listed(names: Sequence[str]) -> str:
    """Return the first three names, and the number of the others, as text."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more


# Shape and strides of each parameter by name.
_LAYOUTS = dict_of(dict_of(list_of(count), ("shape", "stride")))

# What every state dict has, and what an Averager adds. Both accept further keys.
HEADER = record(version=count, spec=text, rank=count, world_size=count)
ENGINE = record(
    step=count,
    seed=count,
    scale=loss_scale,
    lrs=dict_of(learning_rate),
    flushing=flag,
    groups=list_of(list_of(text)),
    buckets=list_of(list_of(text)),
    parameters=_LAYOUTS,
    traffic=dict_of(count, ("sent", "received", "dense", "control", "inside")),
    slots=dict_of(record(kind=text, sharded=flag, tensors=dict_of(tensor()))),
)

# What a run with nodes adds: which piece of the whole parameters the state belongs to.
TWO_LEVELS = optional(record(node=count, position=count, node_size=count, parameters=_LAYOUTS))
# Whether `redistribute` has cut the parameters into other pieces. Values that belong to a piece,
# but not to its elements, are then missing: they begin anew.
RECUT = "recut"


def header(spec: str, exchange: Exchange) -> dict[str, Any]:
    """Return the entries that identify the run and the rank of a state dict."""
    rank, world_size = exchange.rank, exchange.world_size
    return {"version": VERSION, "spec": spec, "rank": rank, "world_size": world_size}


def check_header(state: Any, spec: str, exchange: Exchange, advice: Mapping[str, str]) -> None:
    """Require this version, method (or schedule), rank and world size; `advice` says what to do."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"expected a state dict, not {type(state).__name__}")
    wanted = header(spec, exchange)
    if "states" in state:
        raise CheckpointError("a state of gather_state_dict(): pass it to load_gathered(state)")
    HEADER(state, "the state dict")
    advice = {
        "version": "load it with the version of torchcomp that saved it",
        "rank": "each rank must load the state that it saved itself. Where one rank writes for all "
        "(Lightning, Accelerate, Fabric, Ray), save torchcomp.Gathered(handle) instead. With "
        "torch.distributed.checkpoint, name it by rank: dcp.save({f'handle{rank}': handle})",
        **advice,
    }
    # Version first: another version's other entries can have another meaning.
    for name in ("version", "spec", "world_size", "rank"):
        if state[name] != wanted[name]:
            raise CheckpointError(
                f"the checkpoint has {name} {state[name]!r}, but this run has {wanted[name]!r}: "
                f"{advice.get(name, '')}"
            )


def layout_of(parameters: Mapping[str, Tensor]) -> dict[str, dict[str, list[int]]]:
    """Return the shape and strides of each parameter by name, as stored in a checkpoint."""
    both = {name: (list(each.shape), list(each.stride())) for name, each in parameters.items()}
    return {name: {"shape": shape, "stride": stride} for name, (shape, stride) in both.items()}


def digest_of(tensors: Mapping[str, Tensor]) -> int:
    """Return a checksum of all values, to verify that they are equal elsewhere."""
    checksum = 0
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().view(-1)
        # By bytes: NumPy has no bfloat16.
        checksum = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def check_engine(state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
    """Require the state of an :class:`.Averager` with parameters of these names and shapes."""
    ENGINE(state, "the state dict")
    # Strides can differ. Only shards depend on them; see `load_slots`.
    saved = {name: list(each["shape"]) for name, each in state["parameters"].items()}
    here = {name: list(parameter.shape) for name, parameter in parameters.items()}
    if other := [name for name in saved | here if saved.get(name) != here.get(name)]:
        raise CheckpointError(
            f"a checkpoint of another model: {listed(other)}, the first of shape "
            f"{saved.get(other[0])} in the checkpoint and {here.get(other[0])} in the model"
        )
    for division in ("groups", "buckets"):
        check_division(division, state, parameters)


def check_division(
    division: str, state: Mapping[str, Any], parameters: Mapping[str, Tensor] | None = None
) -> None:
    """Require that each parameter is in one group of "groups" or "buckets", of one dtype each."""
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
