"""Comparison of a method's traffic with that of plain DDP, and with that of similar methods."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchcomp.aggregators import (
    EF,
    Aggregator,
    Bidirectional,
    Mean,
    PowerSGD,
    planned_traffic,
)
from torchcomp.aggregators.one_way import COLLECTIVES, OneWay
from torchcomp.compressors import COMPRESSORS
from torchcomp.engine.bucket import BucketShape
from torchcomp.exchange.traffic import compared, sum_bytes
from torchcomp.specs.errors import SpecError
from torchcomp.specs.spec import parse_aggregator

MOST_RANKS = 10**6
"""Largest number of ranks that a plan can be made for. No cluster has more GPUs."""
_WORTH = 1.5
"""Hints name methods that send at least this many times less."""

Shapes = Sequence[BucketShape]


def break_even(method: Aggregator, shapes: Shapes, dense: int) -> int | None:
    """Return the smallest world size at which a method sends at least as much as plain DDP.

    None if there is none up to :data:`MOST_RANKS`, or if all messages are all-reduced: these are
    the same share of plain DDP's bytes for any number of ranks.

    Args:
        method: the method.
        shapes: shapes of its buckets.
        dense: number of gradient bytes that plain DDP reduces per exchange of the method.
    """

    def loses(world_size: int) -> bool:
        return _sent(method, shapes, world_size) >= sum_bytes(dense, world_size)

    summed = all(
        method.settled.cost(shape, MOST_RANKS).collective == "allreduce" for shape in shapes
    )
    if not dense or summed or not loses(MOST_RANKS):
        return None
    # The share of plain DDP's bytes grows with the number of ranks, or stays.
    return bisect_left(range(MOST_RANKS), True, lo=2, key=loses)


def hints(method: Aggregator, shapes: Shapes, world_size: int, dense: int) -> tuple[str, ...]:
    """Return what would send or lose less on this many ranks, one sentence for each method.

    Args:
        method: the method.
        shapes: shapes of its buckets.
        world_size: number of ranks.
        dense: number of gradient bytes that plain DDP reduces per exchange of the method.
    """
    own = _sent(method, shapes, world_size)
    families = [
        (_other_exchanges(method), ""),
        (_both_ways(method), "; it compresses the mean as well"),
    ]
    # More than plain DDP: a method that loses less is better, even if others send fewer bytes.
    if own > sum_bytes(dense, world_size):
        families.append((_dense_messages(method), ""))
    found = list(_remarks(method, shapes))
    for family, remark in families:
        sent = {str(other): _sent(other, shapes, world_size) for other in family}
        best = min(sent, key=sent.__getitem__, default=None)
        if best is not None and 0 < sent[best] * _WORTH <= own:
            found.append(f"{best} sends {compared(sent[best], own)}{remark}")
    return tuple(found)


def _remarks(method: Aggregator, shapes: Shapes) -> Iterator[str]:
    """Yield what the bytes alone do not show."""
    if isinstance(method, Mean) and method.loses:
        other = EF(method.compressor, exchange=method.exchange)
        yield f"{other} sends in later steps what this method drops"
    if isinstance(method, PowerSGD) and all(len(s) < 2 for each in shapes for s in each.shapes):
        yield f"{method} compresses matrices, and a vector has none: pass a model instead of numel"


def _other_exchanges(method: Aggregator) -> Iterator[Aggregator]:
    """Yield the same method with other collectives, as far as its compressor allows."""
    if isinstance(method, OneWay):
        for exchange in COLLECTIVES[1:]:  # without "auto", which is one of the others
            try:
                yield replace(method, exchange=exchange)
            except SpecError:
                continue


def _both_ways(method: Aggregator) -> Iterator[Aggregator]:
    """Yield the method that compresses the mean as well, if there is one."""
    if isinstance(method, EF | Mean):
        dtype = getattr(method, "memory_dtype", None)
        try:
            yield Bidirectional(method.compressor, method.compressor, memory_dtype=dtype)
        except SpecError:  # the compressor is not contractive
            return


def _dense_messages(method: Aggregator) -> Iterator[Aggregator]:
    """Yield the same method with each compressor that sends every value, by all-reduce."""
    if isinstance(method, EF | Mean):
        for cls in COMPRESSORS:
            if cls.summable and cls.elementwise:
                like = parse_aggregator(cls.example or cls.name)
                if isinstance(like, Mean):
                    yield replace(method, compressor=like.compressor, exchange="auto")


def _sent(method: Aggregator, shapes: Shapes, world_size: int) -> int:
    """Return the bytes that the last rank sends per step. It owns the largest shard."""
    return planned_traffic(method, shapes, world_size, world_size - 1).sent
