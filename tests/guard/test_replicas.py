"""Replicas whose parameters differ are found, whatever the difference is."""

import pytest
import torch

from tests.engine import small
from tests.support.vectors import normal
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


def are_equal(replicas, exchange, dimension):
    """Whether the replicas of all ranks have the same digest."""
    numbers = replicas.digest(exchange.device, dimension)
    return replicas.are_equal(exchange.sum_control(numbers)())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_parameter_is_found_on_its_rank(change, dtype):
    # 1024 equal changes of a bit pattern are often a multiple of 2**32.
    values = {"weight": normal(1024).to(dtype), "bias": torch.full((512,), 0.25, dtype=dtype)}

    def body(exchange):
        own = {name: each.clone() for name, each in values.items()}
        same = are_equal(Replicas(own), exchange, 1)
        if exchange.rank == 1:
            own["weight"] = CHANGES[change](own["weight"])
        replicas = Replicas(own)
        found = [are_equal(replicas, exchange, dimension) for dimension in (0, 1)]
        return same, all(found), replicas.differing(exchange)

    assert small.on_ranks(3, body) == [(True, False, {"weight": (1,)})] * 3


@pytest.mark.parametrize("numel", [1, 2, 4, 10, 64, 508])
@pytest.mark.parametrize("change", ["another sign", "twice the value", "zeros", "ones"])
def test_a_changed_small_parameter_is_found(change, numel):
    def body(exchange):
        values = normal(numel)
        changed = CHANGES[change](values) if exchange.rank == 1 else values
        return are_equal(Replicas({"bias": changed}), exchange, 1)

    assert small.on_ranks(2, body) == [False, False]


def test_strides_do_not_count():
    values = normal(2 * 3 * 5 * 7).view(2, 3, 5, 7)

    def body(exchange):
        layout = torch.channels_last if exchange.rank else torch.contiguous_format
        own = values.clone(memory_format=layout)
        return are_equal(Replicas({"weight": own}), exchange, 1)

    assert small.on_ranks(2, body) == [True, True]


def test_ranks_are_compared_with_those_of_the_same_shard():
    def body(exchange):
        shard = exchange.rank // 2
        values = normal(64) + shard
        same = are_equal(Replicas({"weight": values}, shard, 2), exchange, 0)
        values = values + (exchange.rank == 3)
        return same, are_equal(Replicas({"weight": values}, shard, 2), exchange, 0)

    assert small.on_ranks(4, body) == [(True, False)] * 4


def test_many_equal_ranks_raise_no_false_alarm():
    replicas = Replicas({"weight": normal(1000)})
    numbers = replicas.digest(torch.device("cpu"), 0)
    total = 4_200 * numbers
    assert replicas.are_equal(total)
    other = Replicas({"weight": normal(1000) + 1}).digest(torch.device("cpu"), 0)
    assert not replicas.are_equal(total - numbers + other)
