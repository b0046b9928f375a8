"""Replicas whose parameters differ are found, whatever the difference is."""

import pytest
import torch
import torch.distributed as dist

from tests.engine import small
from tests.support.ranks import on_threads
from tests.support.vectors import normal
from torchcomp.exchange import Exchange, ProcessGroupExchange
from torchcomp.guard.replicas import Replicas

CHANGES = {
    "another sign": torch.neg,
    "twice the value": lambda values: values * 2,
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "one value": lambda values: values.index_fill(0, torch.tensor([700]), 0.5),
    "two values in exchange": lambda values: values.index_copy(
        0, torch.tensor([0, 700]), values[[700, 0]]
    ),
    "two neighbours in exchange": lambda values: values.index_copy(
        0, torch.tensor([600, 601]), values[[601, 600]]
    ),
    "two other signs": lambda values: values.index_copy(0, torch.tensor([5, 7]), -values[[5, 7]]),
}


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Equal changes of 1024 bit patterns are often a multiple of 2**32. A small parameter has no rows.
CASES = [(change, 1024, dtype) for change in CHANGES for dtype in DTYPES]
CASES += [(change, n, torch.float32) for change in list(CHANGES)[:4] for n in (1, 4, 64, 508)]


@pytest.mark.parametrize(("change", "numel", "dtype"), CASES)
def test_a_changed_parameter_is_found_on_its_rank(change, numel, dtype):
    values = {"weight": normal(numel).to(dtype), "bias": torch.full((512,), 0.25, dtype=dtype)}

    def body(exchange):
        own = {name: each.clone() for name, each in values.items()}
        same = Replicas(own).differing(exchange)
        if exchange.rank == 1:
            own["weight"] = CHANGES[change](own["weight"])
        return same, Replicas(own).differing(exchange)

    assert small.on_ranks(3, body) == [({}, {"weight": (1,)})] * 3


def test_strides_do_not_count():
    values = normal(2 * 3 * 5 * 7).view(2, 3, 5, 7)

    def body(exchange):
        layout = torch.channels_last if exchange.rank else torch.contiguous_format
        own = values.clone(memory_format=layout)
        return Replicas({"weight": own}).differing(exchange)

    assert small.on_ranks(2, body) == [{}] * 2


def sharded():
    """Two replicas of two shards, on four ranks."""
    rank, device = dist.get_rank(), torch.device("cpu")
    groups = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))]
    inside = ProcessGroupExchange(groups[rank // 2], device)
    between = ProcessGroupExchange(groups[2 + rank % 2], device)
    Exchange.split(inside, between)
    values = normal(64) + rank % 2
    same = Replicas({"weight": values}, rank % 2).differing(between)
    different = Replicas({"weight": values}).differing(between)
    values = values + (rank == 3)
    return same, list(different), Replicas({"weight": values}, rank % 2).differing(between)


def test_ranks_are_compared_with_those_of_the_same_shard():
    # Of two ranks, none is right.
    for same, different, found in on_threads(4, sharded):
        assert not same
        assert different == ["weight"]
        assert found["weight"] in ((1,), (3,))
