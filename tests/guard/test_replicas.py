"""Replicas whose parameters differ are found, whatever the difference is."""

import pytest
import torch

from tests.engine import small
from tests.support.vectors import normal
from torchcomp.guard.replicas import Replicas


def swapped(values, *at):
    return values.index_copy(0, torch.tensor(at), values[list(reversed(at))])


CHANGES = {
    "another sign": torch.neg,
    "twice the value": lambda values: values * 2,
    "zeros": torch.zeros_like,
    "one value": lambda values: values.index_fill(0, torch.tensor([700]), 0.5),
    "two values in exchange": lambda values: swapped(values, 0, 700),
    "two neighbours in exchange": lambda values: swapped(values, 600, 601),
    "two other signs": lambda values: values.index_copy(0, torch.tensor([5, 7]), -values[[5, 7]]),
}

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Equal changes of 1024 bit patterns are often a multiple of 2**32. A small parameter has no rows.
CASES = [(change, 1024, dtype) for change in CHANGES for dtype in DTYPES]
CASES += [(change, n, torch.float32) for change in list(CHANGES)[:3] for n in (1, 4, 64, 508)]


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
