"""The bytes that a method is planned to send, per rank, per network card, and on two levels."""

from collections.abc import Sequence
from dataclasses import replace

from torchcomp.aggregators.base import Aggregator
from torchcomp.checkpoints.pieces import pieces_of
from torchcomp.engine.bucket import BucketShape
from torchcomp.exchange.traffic import Load, Traffic, sum_bytes


def planned_traffic(
    method: Aggregator,
    shapes: Sequence[BucketShape],
    world_size: int,
    rank: int = 0,
    node: int = 1,
) -> Traffic:
    """Return the bytes of a step in the last stage, through the network card of a node."""
    if node == world_size:
        return Traffic()  # nothing passes the card of the only node
    settled = method.settled
    load = Load()
    for shape in shapes:
        load.add(settled.cost(shape, world_size, rank, node).load)
    return load.traffic(world_size, _dense(shapes, world_size, node))


def planned_two_levels(
    method: Aggregator, shapes: Sequence[BucketShape], world_size: int, node: int, rank: int = 0
) -> Traffic:
    """As :func:`planned_traffic` of one rank, of whole buckets, with ``nodes=node``."""
    pieces = pieces_of(shapes, node)
    between = planned_traffic(method, pieces, world_size // node, rank // node)
    # A reduce-scatter and an all-gather move a piece to each other rank of the node.
    inside = 2 * (node - 1) * sum(piece.nbytes for piece in pieces)
    return replace(between, dense=_dense(shapes, world_size, node) // node, inside=inside)


def _dense(shapes: Sequence[BucketShape], world_size: int, node: int) -> int:
    # A ring of all ranks leaves each node once: the card carries what one rank sends.
    nbytes = sum(shape.nbytes for shape in shapes)
    return sum_bytes(nbytes, world_size) if node < world_size else 0
