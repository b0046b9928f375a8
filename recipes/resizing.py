"""The state of a rank, from a checkpoint that another number of ranks has saved."""

from typing import Any

import torch

import torchcomp
from recipes.random_state import random_state, seed_all

State = dict[str, Any]


def resized(states: list[State], rank: int, world_size: int, seed: int) -> State:
    """Return a rank's part of the states of all ranks, which must have the same weights."""
    # Local steps have another momentum on each rank. A new rank continues with that of an old one.
    own = states[rank % len(states)]
    method = own["method"]
    if method is not None:
        methods = [state["method"] for state in states]
        (method,) = torchcomp.redistribute(methods, world_size, rank=rank)
    # The sums of all ranks together stay the same.
    meter = torch.stack([state["meter"] for state in states]).sum(0) / world_size
    # Two ranks must not draw the same noise.
    seed_all(seed)
    return {**own, "method": method, "meter": meter, "random": random_state()}
