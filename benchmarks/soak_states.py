"""Mutated checkpoints."""

from collections.abc import Callable

from benchmarks.soak_fuzz import Outcome

CLIENTS: dict[str, Callable[[], object]] = {}


def mutate_states(name: str, every: int) -> Outcome:
    raise NotImplementedError
