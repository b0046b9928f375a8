"""Checkpoints of the handle. tests/ddp/test_methods.py resumes every method bit for bit."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchcomp
from tests.ddp.runs import TOPK, Run
from tests.support.models import (
    Branches,
    convolutions,
    images,
    kept,
    loss_of,
    residual_norm,
    rows,
    seeded,
    wrap,
)
from tests.support.outcomes import assert_refused, raised_by, reloaded, same
from tests.support.ranks import on_processes, on_threads
from torchcomp import CheckpointError, RankMismatchError

State = dict[str, Any]


def test_resumed_channels_last_run_is_bit_identical() -> None:
    def train(run: Run, *steps: int) -> None:
        for step in steps:
            run.optimizer.zero_grad()
            loss_of(run.model(images(step))).backward()
            run.optimizer.step()

    def body() -> None:
        whole, resumed = Run(module=convolutions()), Run(module=convolutions())
        train(whole, 0, 1, 2)
        resumed.model.load_state_dict(copy.deepcopy(whole.model.state_dict()))
        resumed.handle.load_state_dict(reloaded(whole.state))
        for run in (whole, resumed):
            train(run, 3, 4, 5)
        assert torch.equal(whole.weights, resumed.weights)
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


def test_state_saved_while_a_swap_flushes_the_residual_resumes() -> None:
    def body() -> None:
        whole = Run().train(0, 1, 2)
        whole.handle.swap("mean")
        state = reloaded(whole.state)
        assert kept(state)
        resumed = Run("mean")
        resumed.model.load_state_dict(copy.deepcopy(whole.model.state_dict()))
        resumed.handle.load_state_dict(state)
        assert torch.equal(whole.train(3, 4).weights, resumed.train(3, 4).weights)
        assert residual_norm(whole.handle) == residual_norm(resumed.handle) == 0

    on_threads(2, body)


def test_residual_of_a_parameter_that_is_unused_after_a_resume_is_kept() -> None:
    def body() -> tuple[Tensor, Tensor]:
        models = [wrap(seeded(Branches().double()), find_unused_parameters=True) for _ in range(2)]
        first, second = (torchcomp.register(model, TOPK) for model in models)
        loss_of(models[0](rows(0), ("left", "right"))).backward()
        residual = kept(first.state_dict())["right.weight"]
        second.load_state_dict(reloaded(first.state_dict()))
        loss_of(models[1](rows(1), ("left",))).backward()
        assert models[1].module.right.weight.grad is None
        return residual, kept(second.state_dict())["right.weight"]

    before, after = zip(*on_threads(2, body), strict=True)
    assert float(torch.stack(before).mean(0).norm()) > 0.1
    torch.testing.assert_close(torch.stack(after).mean(0), torch.stack(before).mean(0))


# --- Checkpoints of another run -------------------------------------------------------------------

BIDIRECTIONAL = 'bidirectional(topk(0.1), topk(0.1), selection="exact")'
SERVER = "server_error"


def state_of(spec: str = TOPK, module: nn.Module | None = None) -> State:
    return Run(spec, module).train(0, 1).state


def of_another_model(state: State) -> State:
    return state_of(BIDIRECTIONAL, nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)).double())


def spoiled(state: State, slot: str, change: Callable[[dict[str, Tensor]], Any]) -> State:
    change(kept(state, slot))
    return state


# tests/test_checkpoint.py has the form of a state, tests/engine/test_mutations.py
# every change of one.
REFUSED: dict[str, tuple[str, Callable[[State], Any]]] = {
    "None": (r"state dict.* NoneType$", lambda s: None),
    "other model": (
        r"'1\.weight' [^;]*\bmodel\b.*'2\.weight' [^;]*\bcheckpoint\b",
        of_another_model,
    ),
    "other method": (r"spec .*'ef\(topk\(0\.1\)\)'.* 'bidirectional\(", lambda s: state_of(TOPK)),
    "other rank": (r"\brank\b", lambda s: {**s, "rank": 1 - s["rank"]}),
    "other shape": (
        r"slots\['error'\]\.tensors\['0\.weight'\] .*\(16, 16\).* \(5, 16\)",
        lambda s: spoiled(s, "error", lambda e: e.update({"0.weight": e["0.weight"][:5]})),
    ),
    "incomplete server residual": (
        rf"slots\['{SERVER}'\].* '",
        lambda s: spoiled(s, SERVER, lambda e: e.pop(next(iter(e)))),
    ),
    "NaN": (
        r"slots\['error'\].*'0\.weight'.*NaN",
        lambda s: spoiled(s, "error", lambda e: e["0.weight"].fill_(torch.nan)),
    ),
}


def test_a_state_that_does_not_fit_raises_and_changes_nothing() -> None:
    def body() -> None:
        run = Run(BIDIRECTIONAL).train(0, 1)
        before, stats = run.state, run.handle.stats
        for case, (match, change) in REFUSED.items():
            with pytest.raises(CheckpointError) as caught:
                run.handle.load_state_dict(change(run.state))
            assert re.search(match, str(caught.value)), case
            assert same(run.state, before), case
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


def _one_rank_resumes() -> None:
    state, run = Run().train(0, 1).state, Run()
    if dist.get_rank() == 0:
        run.handle.load_state_dict(state)
    run.train(0)


def test_resuming_on_one_rank_only_raises_on_every_rank() -> None:
    outcomes = on_processes(2, _one_rank_resumes, catch=True)
    assert all(isinstance(error, RankMismatchError) for error in outcomes), outcomes
