"""Checkpoints: a resumed run is bit-identical, and loading the state of another run raises."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchcomp
from tests.support.cases import only, thorough
from tests.support.models import (
    METHODS,
    SMALL_BUCKETS,
    THROUGH_DDP,
    Branches,
    convolutions,
    images,
    kept,
    loss_of,
    mlp,
    residual_norm,
    rows,
    seeded,
    weights,
    wrap,
)
from tests.support.outcomes import (
    assert_refused,
    messages,
    raised_by,
    reloaded,
    same,
)
from tests.support.ranks import on_processes, on_threads
from torchcomp import CheckpointError, RankMismatchError

TOPK = "ef(topk(0.1))"
STEPS = 8
State = dict[str, Any]


class Run:
    """One rank's model, optimizer and handle; can start from the snapshot of another run."""

    def __init__(
        self,
        spec: str,
        module: nn.Module,
        cap: float | None = SMALL_BUCKETS,
        snapshot: State | None = None,
        seed: int = 0,
    ) -> None:
        self.model = wrap(module, bucket_cap_mb=cap)
        self.handle = torchcomp.register(self.model, spec, seed=seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        if snapshot is not None:
            self.model.module.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.handle.load_state_dict(snapshot["handle"])

    def train(self, steps: range, inputs: Any = rows) -> "Run":
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.model(inputs(step))).backward()
            self.optimizer.step()
        return self

    def snapshot(self) -> State:
        state = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "handle": self.handle.state_dict(),
        }
        return reloaded(state)

    def outcome(self) -> tuple[Tensor, Tensor, torchcomp.Stats]:
        error = [tensor.flatten() for tensor in kept(self.handle.state_dict()).values()]
        return weights(self.model.module), torch.cat([*error, torch.zeros(1)]), self.handle.stats


def interrupted_and_not(spec: str, stop: int, cap: float | None = SMALL_BUCKETS) -> tuple[Run, Run]:
    """Return a run of 8 steps, and one that resumes it from its snapshot after `stop` steps."""
    whole = Run(spec, mlp(), seed=5).train(range(stop))
    # Another seed and other weights: the snapshot must overwrite both.
    resumed = Run(spec, seeded(mlp(), seed=1), cap, whole.snapshot(), seed=6)
    return whole.train(range(stop, STEPS)), resumed.train(range(stop, STEPS))


def assert_same_outcome(whole: Run, resumed: Run) -> None:
    expected, actual = whole.outcome(), resumed.outcome()
    assert torch.equal(actual[0], expected[0]), "weights differ"
    assert torch.equal(actual[1], expected[1]), "residuals differ"
    assert messages(actual[2]) == messages(expected[2])


@pytest.mark.parametrize("spec", only(METHODS, now=THROUGH_DDP))
@pytest.mark.parametrize("stop", [1, 5], ids=["before_rebuild", "after_rebuild"])
def test_resumed_run_is_bit_identical(spec: str, stop: int) -> None:
    on_threads(3, lambda: assert_same_outcome(*interrupted_and_not(spec, stop)))


@pytest.mark.parametrize("spec", only(METHODS, now=THROUGH_DDP))
@pytest.mark.parametrize("cap", [4 * SMALL_BUCKETS, *thorough([None])], ids=["larger", "default"])
def test_resumed_run_with_another_bucket_size_is_bit_identical(spec: str, cap: float) -> None:
    on_threads(3, lambda: assert_same_outcome(*interrupted_and_not(spec, 1, cap)))


def test_resumed_run_over_gloo_is_bit_identical() -> None:
    on_processes(2, _over_gloo)


def _over_gloo() -> None:
    for spec in (TOPK, 'ef(randk(0.1), exchange="allgather")', 'ef(cast("bf16"))', "mean"):
        for stop, cap in ((1, SMALL_BUCKETS), (4, None)):
            whole, resumed = interrupted_and_not(spec, stop, cap)
            assert_same_outcome(whole, resumed)
            whole.handle.close()
            resumed.handle.close()


def test_resumed_channels_last_run_is_bit_identical() -> None:
    def body() -> None:
        whole = Run(TOPK, convolutions()).train(range(3), images)
        resumed = Run(TOPK, convolutions(), snapshot=whole.snapshot())
        assert_same_outcome(whole.train(range(3, 6), images), resumed.train(range(3, 6), images))

    on_threads(3, body)


def test_state_is_a_copy_keyed_by_parameter_name() -> None:
    def body() -> None:
        run = Run(TOPK, mlp()).train(range(2))
        state = run.handle.state_dict()
        before = copy.deepcopy(state)
        run.train(range(2, 4))
        names = {name for name, _ in run.model.module.named_parameters()}
        assert set(kept(state)) == set(state["parameters"]) == names
        for name in names:
            assert torch.equal(kept(state)[name], kept(before)[name])
        run.handle.load_state_dict(state)
        run.train(range(4, 6))
        for name in names:
            assert torch.equal(kept(state)[name], kept(before)[name])

    on_threads(2, body)


def test_state_saved_while_a_swap_flushes_the_residual_resumes() -> None:
    def body() -> None:
        whole = Run(TOPK, mlp()).train(range(3))
        whole.handle.swap("mean")
        snapshot = whole.snapshot()
        assert kept(snapshot["handle"])
        resumed = Run("mean", mlp(), snapshot=snapshot)
        whole.train(range(3, 5))
        resumed.train(range(3, 5))
        assert_same_outcome(whole, resumed)
        assert residual_norm(whole.handle) == 0

    on_threads(2, body)


# --- Checkpoints of another run -------------------------------------------------------------------


BIDIRECTIONAL = 'bidirectional(topk(0.1), topk(0.1), selection="exact")'
SERVER = "server_error"


def state_of(spec: str = TOPK, module: nn.Module | None = None) -> State:
    return Run(spec, module or mlp()).train(range(2)).handle.state_dict()


def of_another_model(state: State) -> State:
    return state_of(BIDIRECTIONAL, nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)).double())


def damaged(spoil: Callable[[State], Any]) -> Callable[[State], Any]:
    def change(state: State) -> State:
        spoil(state)
        return state

    return change


# tests/test_checkpoint.py has the form of a state value by value.
REFUSED: dict[str, tuple[str, Callable[[State], Any]]] = {
    "None": (r"state dict.* NoneType$", lambda s: None),
    "list": (r"state dict.* list$", lambda s: [1, 2]),
    "other model": (
        r"'1\.weight' [^;]*\bmodel\b.*'2\.weight' [^;]*\bcheckpoint\b",
        of_another_model,
    ),
    "other method": (r"spec .*'ef\(topk\(0\.1\)\)'.* 'bidirectional\(", lambda s: state_of(TOPK)),
    "other rank": (r"\brank\b", lambda s: {**s, "rank": 1 - s["rank"]}),
    "no groups": (r"'groups'", damaged(lambda s: s.pop("groups"))),
    "no residual": (r"slots\['error'\]", damaged(lambda s: s["slots"].pop("error"))),
    "other shape": (
        r"slots\['error'\]\.tensors\['0\.weight'\] .*\(16, 16\).* \(5, 16\)",
        damaged(lambda s: kept(s).update({"0.weight": kept(s)["0.weight"][:5]})),
    ),
    "incomplete server residual": (
        rf"slots\['{SERVER}'\].* '",
        damaged(lambda s: kept(s, SERVER).pop(next(iter(kept(s, SERVER))))),
    ),
    "unknown name": (
        rf"slots\['{SERVER}'\].*'x'",
        damaged(lambda s: kept(s, SERVER).update(x=torch.ones(0))),
    ),
    "name in two groups": (
        r"\bgroups\b.*'6\.bias'",
        damaged(lambda s: s["groups"].append(["6.bias"])),
    ),
    "other strides": (
        r"'\d\.weight' .*strides.*\d+.* \d+",
        damaged(lambda s: [p["stride"].reverse() for p in s["parameters"].values()]),
    ),
    "NaN": (
        r"slots\['error'\].*'0\.weight'.*NaN",
        damaged(lambda s: kept(s)["0.weight"].fill_(torch.nan)),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_that_does_not_fit_raises_and_changes_nothing(case: str) -> None:
    match, change = REFUSED[case]

    def body() -> None:
        run = Run(BIDIRECTIONAL, mlp()).train(range(2))
        before, stats = run.handle.state_dict(), run.handle.stats
        with pytest.raises(CheckpointError, match=match):
            run.handle.load_state_dict(change(run.handle.state_dict()))
        assert same(run.handle.state_dict(), before)
        assert run.handle.stats == stats
        run.train(range(2, 3))

    on_threads(2, body)


def test_error_of_another_world_size_has_both_sizes_and_advice() -> None:
    states = on_threads(3, state_of)

    def body() -> None:
        Run(TOPK, mlp()).handle.load_state_dict(states[dist.get_rank()])

    match = r"world_size .*\b3\b.* \b2\b.* torchcomp\.redistribute"
    assert_refused(2, body, CheckpointError, match=match)


def ranks_of_different_steps() -> str:
    run = Run(TOPK, mlp())
    states = [run.snapshot(), run.train(range(1)).snapshot(), run.train(range(2)).snapshot()]
    resumed = Run(TOPK, mlp(), snapshot=states[1 + dist.get_rank() % 2])
    resumed.optimizer.zero_grad()
    before = kept(resumed.handle.state_dict())
    error = raised_by(lambda: loss_of(resumed.model(rows(9))).backward())
    assert isinstance(error, RankMismatchError), repr(error)
    after = kept(resumed.handle.state_dict())
    assert all(torch.equal(after[name], before[name]) for name in before)
    resumed.handle.close()
    run.handle.close()
    return str(error)


def test_ranks_resumed_from_different_steps_raise_at_the_next_step_with_both() -> None:
    outcomes = [
        *on_threads(3, ranks_of_different_steps),
        *on_processes(2, ranks_of_different_steps),
    ]
    for message in outcomes:
        assert re.search(r"\bstep: 1 on rank.*\b3 on rank 1\b", message), message


def test_resuming_on_one_rank_only_raises_on_every_rank() -> None:
    outcomes = on_processes(2, _one_rank_resumes, catch=True)
    assert all(isinstance(error, RankMismatchError) for error in outcomes), outcomes


def _one_rank_resumes() -> None:
    run = Run(TOPK, mlp()).train(range(2))
    state = run.handle.state_dict()
    run.handle.close()
    run = Run(TOPK, mlp())
    if dist.get_rank() == 0:
        run.handle.load_state_dict(state)
    run.train(range(1))


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
