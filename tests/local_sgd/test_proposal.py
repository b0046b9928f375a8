"""LocalSGD(model, optimizer, "auto"): average after each step, and propose a schedule."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torchcomp
from tests.support.clock import Clock
from tests.support.models import loss_of, mlp, rows, weights, wrap
from tests.support.outcomes import assert_refused, raised_by
from tests.support.ranks import on_threads
from torchcomp import SpecError
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


def train(spec: Any, steps: int, pause: float = 0.0) -> tuple[Tensor, Any, str]:
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    sync = torchcomp.LocalSGD(model, optimizer, spec, total_steps=steps)
    for step in range(steps):
        CLOCK.advance(pause * (1 + dist.get_rank()))
        optimizer.zero_grad()
        loss_of(model(rows(step))).backward()
        optimizer.step()
    return weights(model), sync.proposal, str(sync.schedule)


def slow(self: ProcessGroupExchange, values: Tensor) -> None:
    CLOCK.advance(0.02)
    _all_reduce(self, values)


def test_a_slow_average_is_proposed_to_run_less_often() -> None:
    with mock.patch.object(ProcessGroupExchange, "_all_reduce", slow):
        found = on_threads(2, train, "auto", STEPS + 2, 0.005)
    for _, found_here, schedule in found:
        assert found_here == found[0][1]
        assert schedule == "every(1)"
        assert found_here.average == pytest.approx(0.02 * GROUPS)
        # The pause of rank 1, which is the longer one.
        assert found_here.alone == pytest.approx(0.01)
        assert found_here.schedule == "every(64)"


def test_training_is_that_of_every_1() -> None:
    for (auto, *_), (every, *_) in zip(
        on_threads(2, train, "auto", 10), on_threads(2, train, "every(1)", 10), strict=True
    ):
        assert torch.equal(auto, every)


def test_ranks_with_auto_and_its_schedule_are_refused() -> None:
    def body() -> None:
        model = wrap(mlp())
        spec = "auto" if dist.get_rank() == 0 else "every(1)"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torchcomp.LocalSGD(model, optimizer, spec, total_steps=4)

    assert_refused(2, body, torchcomp.RankMismatchError, "auto", "every(1)")


def test_there_is_no_proposal_before_enough_steps_or_with_another_schedule() -> None:
    for spec, steps in (("auto", STEPS - 1), ("every(1)", STEPS + 2)):
        assert [each for _, each, _ in on_threads(2, train, spec, steps)] == [None, None]


@pytest.mark.parametrize(
    ("alone", "average", "h"),
    [(1.0, 0.05, 1), (1.0, 0.11, 2), (1.0, 0.4, 4), (1.0, 0.41, 8), (1e-3, 10.0, 64)],
)
def test_the_average_takes_at_most_a_tenth_of_the_other_time(
    alone: float, average: float, h: int
) -> None:
    proposed = Proposal(alone, average)
    assert proposed.h == h
    assert (f"every({h})" in str(proposed)) == (h > 1)
    assert ("plain DDP" in str(proposed)) == (h == 1)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (["auto", "every(2)"], {}),
        ("auto", {"overlap": True}),
        ("auto(steps=40)", {}),
    ],
)
def test_what_does_not_fit_auto_is_refused(spec: Any, options: dict[str, Any]) -> None:
    def body() -> None:
        model = wrap(mlp())
        half = list(model.parameters())
        optimizers = [torch.optim.SGD(half[:4], lr=0.1), torch.optim.SGD(half[4:], lr=0.1)]
        chosen = optimizers if isinstance(spec, list) else torch.optim.SGD(half, lr=0.1)
        error = raised_by(lambda: torchcomp.LocalSGD(model, chosen, spec, total_steps=4, **options))
        assert isinstance(error, SpecError)
        assert "auto" in str(error)

    on_threads(2, body)
