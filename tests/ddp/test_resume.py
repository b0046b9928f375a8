"""Checkpoints of the handle. tests/ddp/test_methods.py resumes every method bit for bit."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.runs import Run
from tests.support.models import convolutions, images, kept, loss_of
from tests.support.outcomes import assert_refused, raised_by, reloaded, same
from tests.support.ranks import on_processes, on_threads
from torchcomp import CheckpointError, RankMismatchError

State = dict[str, Any]


class OfImages(Run):
    def loss(self, step: int) -> Tensor:
        return loss_of(self.model(images(step)))


def test_resumed_channels_last_run_is_bit_identical() -> None:
    def body() -> None:
        whole, resumed = OfImages(module=convolutions()), OfImages(module=convolutions())
        whole.train(0, 1, 2)
        resumed.model.load_state_dict(copy.deepcopy(whole.model.state_dict()))
        resumed.handle.load_state_dict(reloaded(whole.state))
        assert torch.equal(whole.train(3, 4, 5).weights, resumed.train(3, 4, 5).weights)
        assert same(whole.state["slots"], resumed.state["slots"])

    on_threads(3, body)


def test_state_is_a_copy_keyed_by_parameter_name() -> None:
    def body() -> None:
        run = Run().train(0, 1)
        state = run.state
        before = copy.deepcopy(state)
        names = {name for name, _ in run.model.module.named_parameters()}
        assert set(kept(state)) == set(state["parameters"]) == names
        run.train(2, 3)
        assert same(state, before)
        run.handle.load_state_dict(state)
        run.train(4, 5)
        assert same(state, before)

    on_threads(2, body)


# --- Checkpoints of another run -------------------------------------------------------------------


def state_of(module: nn.Module | None = None) -> State:
    return Run(module=module).train(0, 1).state


# tests/engine/test_mutations.py has every other change of a state.
REFUSED: dict[str, Callable[[State], Any]] = {
    r"state dict.* NoneType$": lambda state: None,
    r"another model: '0\.weight'.*\[8, 16\] in the checkpoint": lambda state: state_of(
        nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)).double()
    ),
    r"\brank\b": lambda state: {**state, "rank": 1 - state["rank"]},
}


def test_a_state_that_does_not_fit_raises_and_changes_nothing() -> None:
    def body() -> None:
        run = Run().train(0, 1)
        before, stats = run.state, run.handle.stats
        for match, change in REFUSED.items():
            with pytest.raises(CheckpointError) as caught:
                run.handle.load_state_dict(change(run.state))
            assert re.search(match, str(caught.value)), match
            assert same(run.state, before), match
        assert run.handle.stats == stats
        run.train(2)

    on_threads(2, body)


def test_error_of_another_world_size_has_both_sizes_and_advice() -> None:
    states = on_threads(3, state_of)

    def body() -> None:
        Run().handle.load_state_dict(states[dist.get_rank()])

    match = r"world_size .*\b3\b.* \b2\b.* torchcomp\.redistribute"
    assert_refused(2, body, CheckpointError, match=match)


def ranks_of_different_steps() -> str:
    run = Run()
    states = [run.train(0).state, run.train(1, 2).state]
    run.handle.load_state_dict(states[dist.get_rank() % 2])
    run.optimizer.zero_grad()
    before = kept(run.state)
    error = raised_by(lambda: run.backward(9))
    assert isinstance(error, RankMismatchError), repr(error)
    assert same(kept(run.state), before)
    run.handle.close()
    return str(error)


def test_ranks_resumed_from_different_steps_raise_at_the_next_step_with_both() -> None:
    for message in on_processes(2, ranks_of_different_steps):
        assert re.search(r"\bstep: 1 on rank.*\b3 on rank 1\b", message), message
