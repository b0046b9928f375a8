"""Rounds: which pairs of ranks are measured at the same time."""

import itertools
import random
from collections.abc import Sequence

Pair = tuple[int, int]

ALL_PAIRS = 16
"""Up to this many ranks, every pair is measured."""

_SAMPLES = 3
"""Above it, every rank has its two neighbours and this many other ranks."""


def chosen_pairs(world_size: int) -> list[Pair]:
    """Return the pairs to measure, each as (lower rank, higher rank), the same on all ranks."""
    if world_size <= ALL_PAIRS:
        return list(itertools.combinations(range(world_size), 2))
    pairs = {_ordered(rank, (rank + 1) % world_size) for rank in range(world_size)}
    draw = random.Random(world_size)
    for rank in range(world_size):
        others = draw.sample([other for other in range(world_size) if other != rank], _SAMPLES)
        pairs |= {_ordered(rank, other) for other in others}
    return sorted(pairs)


def rounds(pairs: Sequence[Pair], nodes: Sequence[int]) -> list[list[Pair]]:
    """Divide pairs into rounds in which no two pairs share a rank or a network card.

    Args:
        pairs: the pairs.
        nodes: the node of every rank. A pair on two nodes uses the cards of both.
    """
    # By distance: neighbours at a distance fill a round, as in a round-robin tournament.
    ordered = sorted(pairs, key=lambda pair: (pair[1] - pair[0], pair))
    made: list[tuple[set[tuple[str, int]], list[Pair]]] = []
    for pair in ordered:
        uses = {("rank", rank) for rank in pair}
        places = {nodes[rank] for rank in pair}
        if len(places) == 2:
            uses |= {("card", node) for node in places}
        for used, members in made:
            if not used & uses:
                used |= uses
                members.append(pair)
                break
        else:
            made.append((uses, [pair]))
    return [members for _, members in made]


def _ordered(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)
