"""Checkpoints and statistics of JointSpar."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.jointspar.script import backward
from tests.support.models import mlp, rows, weights, wrap
from tests.support.outcomes import assert_refused, reloaded
from tests.support.ranks import on_threads
from torchcomp.jointspar import JointSpar
from torchcomp.specs.errors import CheckpointError, RankMismatchError

OPTIONS, TOPK = {"budget": 0.5, "p_min": 0.1}, {"compress": "ef(topk(0.1))"}


class Run:
    def __init__(self, state=None, **options):
        self.model = wrap(mlp())
        self.jointspar = JointSpar(self.model, **{**OPTIONS, **options})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.jointspar.load_state_dict(state["jointspar"])

    def train(self, start, stop):
        kept = []
        for step in range(start, stop):
            kept.append(self.jointspar.kept)
            self.optimizer.zero_grad()
            backward(self.model, (rows(step),))
            self.optimizer.step()
        return kept

    def state(self):
        """Return the state after saving it to a file and loading it with weights_only=True."""
        names = "model", "optimizer", "jointspar"
        return reloaded({name: getattr(self, name).state_dict() for name in names})


def trained_state(**options):
    run = Run(**options)
    run.train(0, 3)
    return run.state()


@pytest.mark.parametrize("compress", ["mean", "ef(topk(0.1))"])
@pytest.mark.parametrize("selection", ["shared", "per-rank"])
@pytest.mark.parametrize("cut", [1, 5])
def test_a_resumed_run_continues_bit_for_bit(compress, selection, cut):
    options = {"compress": compress, "selection": selection}

    def body():
        whole = Run(**options)
        kept = whole.train(0, 10)
        half = Run(**options)
        half.train(0, cut)
        # The seed comes from the checkpoint.
        resumed = Run(half.state(), seed=99, **options)
        assert resumed.train(cut, 10) == kept[cut:]
        assert torch.equal(weights(resumed.model), weights(whole.model))
        sections = [run.jointspar.state_dict()["jointspar"] for run in (resumed, whole)]
        assert sections[0] == sections[1]
        assert resumed.jointspar.stats.steps == 10

    on_threads(2, body)


def test_another_number_of_ranks_continues_with_the_same_p_and_sets():
    def first():
        run = Run()
        run.train(0, 5)
        return run.state(), run.jointspar.p

    def second():
        run = Run(before[dist.get_rank() % 2][0])
        assert run.jointspar.p == before[0][1]
        return run.train(5, 8)

    before = on_threads(2, first)
    kept = on_threads(3, second)
    assert kept == [kept[0]] * 3


def unchanged_by(states, options):
    """Load a state, and require that what raises changes nothing."""
    run = Run(**options)
    run.train(0, 1)
    before = run.state()["jointspar"]
    try:
        run.jointspar.load_state_dict(states[dist.get_rank()]["jointspar"])
    finally:
        assert str(run.state()["jointspar"]) == str(before)
        run.train(1, 2)


def test_another_runs_state_is_refused_and_a_residual_is_not_dropped():
    states = on_threads(2, partial(trained_state, **TOPK))
    body = partial(unchanged_by, [*states, states[0]])
    assert_refused(2, partial(body, {**TOPK, "budget": 0.7}), CheckpointError, "budget=0.7")
    assert_refused(3, partial(body, TOPK), CheckpointError, "torchcomp.redistribute")


DAMAGED = [
    (("jointspar",), None),
    (("seed",), -1),
    (("slots",), None),
    (("jointspar", "step"), -1),
    (("jointspar", "layers"), {n: [f"{n}.weight", f"{n}.bias"] for n in "6420"}),
    (("jointspar", "bandit", "p"), [7.0] * 4),
    (("jointspar", "bandit", "p"), [0.9] * 4),  # more than the budget
]


@pytest.mark.parametrize(("path", "value"), DAMAGED)
def test_a_damaged_state_is_refused_and_changes_nothing(path, value):
    (state,) = on_threads(1, trained_state)
    holder = state["jointspar"]
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    assert_refused(1, partial(unchanged_by, [state], {}), CheckpointError, path[-1])


def test_a_checkpoint_loaded_on_one_rank_only_raises_before_the_exchange():
    states = on_threads(2, trained_state)

    def body():
        run = Run(states[1] if dist.get_rank() else None)
        before = weights(run.model)
        try:
            run.train(0, 1)
        finally:
            assert torch.equal(weights(run.model), before)

    assert_refused(2, body, RankMismatchError, "step", "rank 0", "rank 1")


def test_p_that_differs_across_ranks_raises_before_the_exchange():
    def body():
        run = Run()
        run.jointspar._sampler.bandit.p[0] += 1e-12 * dist.get_rank()
        run.train(0, 1)

    assert_refused(2, body, RankMismatchError, "layers", "rank 0", "rank 1")
