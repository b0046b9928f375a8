"""A whole run under torchrun, with faults, and what it leaves behind."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipes.elastic.agents import Agents
from recipes.elastic.faults import Fault, Saboteur
from recipes.elastic.settings import Settings
from recipes.marker import Marker
from recipes.options import as_plain_dict


@dataclass(frozen=True)
class Outcome:
    """What a complete run has left.

    Attributes:
        states: of all ranks after the last step.
        ranks: the number of ranks of every start.
        steps: all steps that were taken, also those that a kill undid.
        seconds: from the first start to the end.
    """

    states: list[dict[str, Any]]
    ranks: list[int]
    steps: int
    seconds: float


def run(
    folder: Path, settings: Settings, nodes: tuple[int, int], faults: Sequence[Fault] = ()
) -> Outcome:
    """Start a run with the smallest number of nodes, carry out the faults, and let it finish."""
    values = {name: value for name, value in as_plain_dict(settings).items() if name != "out"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    begin = time.perf_counter()
    with Agents(folder, nodes, flags) as agents:
        agents.start(nodes[0])
        saboteur = Saboteur(agents, folder, settings.checkpoint_every, settings.seed)
        for fault in faults:
            saboteur.strike(fault)
        agents.finish()
        ranks = [start["ranks"] for start in agents.starts() if start["rank"] == 0]
        steps = len(agents.steps())
    seconds = time.perf_counter() - begin
    return Outcome(states_after(settings.steps, folder), ranks, steps, seconds)


def states_after(step: int, folder: Path) -> list[dict[str, Any]]:
    """Return the states of all ranks from the checkpoint of a step."""
    checkpoint = folder / "checkpoints" / f"step-{step:09d}"
    ranks = Marker.read(checkpoint).ranks
    return [torch.load(checkpoint / f"rank-{rank}.pt") for rank in range(ranks)]


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal bit for bit, except for the counters of bytes.

    A new process compares its settings with the other ranks, which sends some more bytes.
    """
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        compared = one.keys() - {"traffic"}
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in compared)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
