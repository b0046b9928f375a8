"""LocalSGD(model, optimizer, "auto"): average after each step, and propose a schedule."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import torchcomp
from tests.support.clock import Clock
from tests.support.models import loss_of, mlp, rows, weights, wrap
from tests.support.ranks import on_threads
from torchcomp.advisor import proposal
from torchcomp.advisor.proposal import STEPS, Proposal
from torchcomp.exchange import ProcessGroupExchange

CLOCK = Clock()
GROUPS = 3  # of the model, see SMALL_BUCKETS
_all_reduce = ProcessGroupExchange._all_reduce


@pytest.fixture(autouse=True)
def clock() -> Iterator[None]:
    with mock.patch.object(proposal, "now", CLOCK.moment):
        yield


def train(spec, steps, pause=0.0):
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    sync = torchcomp.LocalSGD(model, optimizer, spec, total_steps=steps)
    for step in range(steps):
        CLOCK.advance(pause * (1 + dist.get_rank()))
        optimizer.zero_grad()
        loss_of(model(rows(step))).backward()
        optimizer.step()
    return weights(model), sync.proposal, str(sync.schedule)


def slow(self, values):
    CLOCK.advance(0.02)
    _all_reduce(self, values)


def test_a_slow_average_is_proposed_to_run_less_often():
    with mock.patch.object(ProcessGroupExchange, "_all_reduce", slow):
        found = on_threads(2, train, "auto", STEPS + 2, 0.005)
    for _, found_here, schedule in found:
        assert found_here == found[0][1]
        assert schedule == "every(1)"
        assert found_here.average == pytest.approx(0.02 * GROUPS)
        # The pause of rank 1, which is the longer one.
        assert found_here.alone == pytest.approx(0.01)
        assert found_here.schedule == "every(64)"


@pytest.mark.parametrize(
    ("alone", "average", "h"), [(1.0, 0.05, 1), (1.0, 0.11, 2), (1.0, 0.41, 8), (1e-3, 10.0, 64)]
)
def test_the_average_takes_at_most_a_tenth_of_the_other_time(alone, average, h):
    proposed = Proposal(alone, average)
    assert proposed.h == h
    assert (f"every({h})" in str(proposed)) == (h > 1)
