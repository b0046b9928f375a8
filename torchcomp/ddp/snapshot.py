"""Snapshot: the memories in a handle's state dict, and what it must hold to be loaded."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchcomp import checkpoint
from torchcomp.bucket import Shard
from torchcomp.exchange import Exchange
from torchcomp.memory import ErrorMemory
from torchcomp.state import State

_KEYS = (
    *("step", "seed", "scale", "delivering", "groups", "traffic"),
    *("shapes", "strides", "error", "buckets", "owner", "thresholds"),
)
_ADVICE = {
    "spec": "register that method, load, and then handle.swap(...) to the new one",
    "world_size": "torchcomp.redistribute(states, world_size) makes it fit",
}


def save_memories(
    state: State, parameters: Mapping[str, nn.Parameter], owned: Iterable[Shard]
) -> dict[str, dict[str, Tensor]]:
    """Copies of both memories, as :func:`load_memories` takes them.

    Each is of all parameters (of this rank's shards, for the owner's) or of none, so that a loss
    shows: a parameter that no step has reached yet has zeros.
    """
    whole = {name: parameter.numel() for name, parameter in parameters.items()}
    error = _filled(state.worker, whole, parameters)
    owner = _filled(state.owner, checkpoint.sizes(owned), parameters)
    return {
        "error": checkpoint.shaped(error.items(), parameters),
        "owner": {name: part.clone() for name, part in owner.items()},
    }


def _filled(
    memory: ErrorMemory, sizes: Mapping[str, int], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    held = dict(memory.items())
    wanted = sizes if held else {}
    return {
        name: held[name] if name in held else _zeros(parameters[name], size)
        for name, size in wanted.items()
    }


def _zeros(parameter: Tensor, size: int) -> Tensor:
    return parameter.new_zeros(size, dtype=torch.promote_types(parameter.dtype, torch.float32))


def check_state_dict(
    state: Mapping[str, Any],
    spec: str,
    parameters: Mapping[str, nn.Parameter],
    exchange: Exchange,
) -> None:
    """Require that a state dict is whole, and of this model, method and rank.

    Raises:
        CheckpointError: naming what differs or is missing.
    """
    checkpoint.check_header(state, spec, exchange, _KEYS, _ADVICE)
    checkpoint.check_shapes(state["shapes"], parameters)
    checkpoint.check_division("groups", state["groups"], parameters)
    checkpoint.check_memory(state, parameters, exchange)


def load_memories(state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> State:
    """Both memories of a state dict, and the thresholds that speed its next selection up.

    Raises:
        CheckpointError: if a memory does not have its parameter's shape.
    """
    loaded = State()
    loaded.worker.load(checkpoint.flat(state["error"], parameters))
    loaded.owner.load(checkpoint.on_devices(state["owner"], parameters))
    for bucket, thresholds in zip(state["buckets"], state["thresholds"], strict=True):
        loaded.load_agreed(tuple(bucket), thresholds)
    return loaded
