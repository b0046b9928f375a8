"""Gathered checkpoints: one state dict with the states of all ranks, resumed on any number of them.

tests/integrations/ tests them in the frameworks that need them.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import torchcomp
from tests.local_sgd.hierarchy import Hierarchy
from tests.local_sgd.script import Script
from tests.support.models import kept, loss_of, mlp, rows, weights, wrap
from tests.support.outcomes import messages_of, raised_by, reloaded, same
from tests.support.ranks import on_processes, on_threads
from torchcomp import CheckpointError, Gathered, RankMismatchError

TOPK = "ef(topk(0.1))"
METHODS = (TOPK, "bidirectional(topk(0.1), topk(0.2))", "powersgd(rank=1)")


class Run:
    """One rank's model, optimizer and handle."""

    def __init__(self, spec=TOPK):
        self.model = wrap(mlp())
        self.handle = torchcomp.register(self.model, spec)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def train(self, start, stop):
        for step in range(start, stop):
            self.optimizer.zero_grad()
            loss_of(self.model(rows(step))).backward()
            self.optimizer.step()
        return self


def through_a_file(state):
    """What all ranks load after rank 0 has saved `state`; the others must have none."""
    assert (state is None) == (dist.get_rank() > 0)
    shared = [reloaded(state)]
    dist.broadcast_object_list(shared)
    return shared[0]


def resumes_the_handle(spec):
    """Continue two runs; whether they end equal, and the residual of this rank."""
    whole, resumed = Run(spec).train(0, 4), Run(spec)
    state = through_a_file(whole.handle.gather_state_dict())
    resumed.model.module.load_state_dict(whole.model.module.state_dict())
    resumed.handle.load_gathered(state)
    both = whole.train(4, 8), resumed.train(4, 8)
    states = [run.handle.state_dict() for run in both]
    equal = torch.equal(*(weights(run.model) for run in both)) and same(*map(messages_of, states))
    whole.handle.close(), resumed.handle.close()
    return equal, kept(states[1]).get("0.weight")


@pytest.mark.parametrize("spec", METHODS)
def test_a_run_resumed_from_one_file_is_bit_identical(spec):
    first, second = on_threads(2, resumes_the_handle, spec)
    assert first[0]
    assert second[0]
    assert not torch.equal(first[1], second[1])  # each rank has its own


def resumes_inside_a_round(make):
    """Everything that differs between ranks. In nodes, rank 0 saves a state for each node."""
    whole, resumed = make(), make()
    whole.train(0, 4)
    saving, loading = (
        Gathered(run.sync, model=run.model, optimizer=run.optimizer) for run in (whole, resumed)
    )
    state = through_a_file(saving.state_dict())
    loading.load_state_dict(state)
    return all(map(torch.equal, whole.train(4, 8), resumed.train(4, 8))), len(state["states"])


def over_gloo():
    return resumes_the_handle(TOPK)[0], resumes_inside_a_round(Script)[0]


def test_local_steps_resume_inside_a_round_also_in_nodes():
    assert on_threads(2, resumes_inside_a_round, Script) == [(True, 2)] * 2
    in_nodes = partial(Hierarchy, compress=TOPK)
    assert on_threads(4, resumes_inside_a_round, in_nodes) == [(True, 2)] * 4


def test_both_resume_over_gloo():
    assert on_processes(2, over_gloo) == [(True, True)] * 2


def test_every_rank_gets_the_states_if_asked_and_they_share_no_memory_with_the_run():
    def body():
        run = Run().train(0, 2)
        everywhere, there = (run.handle.gather_state_dict(dst=dst) for dst in (None, 1))
        before = reloaded(everywhere)
        run.train(2, 3)
        assert same(before, everywhere)
        return everywhere, there

    (everywhere, no), (also, there) = on_threads(2, body)
    assert no is None
    assert same([everywhere] * 2, [also, there])


def test_other_objects_of_a_larger_run_are_those_of_rank_0():
    def body(state=None):
        script = Script("every(3)", 12)
        gathered = Gathered(script.sync, optimizer=script.optimizer)
        if state is None:
            script.train(0, 6)
            return gathered.state_dict()
        gathered.load_state_dict(state)
        return script.optimizer.state_dict()

    state = on_threads(2, body)[0]
    expected = state["states"][0]["others"]["optimizer"]
    assert all(same(each, expected) for each in on_threads(3, body, state))


def test_a_wrong_load_names_the_right_one_and_changes_nothing():
    def body():
        run = Run().train(0, 2)
        handle, rank = run.handle, dist.get_rank()
        own, alone = handle.state_dict(), handle.gather_state_dict(dst=None)
        whole = Gathered(handle, model=run.model, dst=None).state_dict()
        ways = "torchcomp.Gathered(handle)", "Lightning", "Accelerate", "dcp.save("
        for load, state, *words in (
            (handle.load_state_dict, alone, "gather_state_dict", "load_gathered("),
            (handle.load_state_dict, alone["states"][1 - rank], *ways),
            (handle.load_gathered, own, f"rank {rank}", "load_state_dict("),
            (handle.load_gathered, None, "None"),
            (handle.load_gathered, alone | {"states": [own, 7]}, "states[1]"),
            (Gathered(handle, models=run.model).load_state_dict, whole, "'models'"),
            (Gathered(handle).load_state_dict, whole, "'model'"),
        ):
            error = raised_by(partial(load, state))
            assert type(error) is CheckpointError
            assert all(word in str(error) for word in words), error
            assert same(handle.state_dict(), own)

    on_threads(2, body)


def test_an_error_on_one_rank_is_raised_on_all():
    class Broken:
        def state_dict(self):
            if dist.get_rank():
                raise ValueError("no luck")
            return {}

    def body():
        handle, rank = Run().handle, dist.get_rank()
        errors = [raised_by(Gathered(handle, broken=Broken()).state_dict)]
        errors += [raised_by(lambda: handle.gather_state_dict(dst=rank))]
        handle.close()
        return [*errors, raised_by(handle.gather_state_dict)]

    for broken, differing, closed in on_threads(2, body):
        assert type(broken) is type(differing) is RankMismatchError
        assert "no luck on rank 1" in str(broken)
        assert "dst: 0 on rank 0" in str(differing)
        assert type(closed) is RuntimeError


def test_ranks_that_took_another_number_of_local_steps_cannot_gather():
    def body():
        script = Script("every(4)", 12)
        script.train(0, 1 + dist.get_rank())
        script.sync.gather_state_dict()

    for error in on_threads(2, body, catch=True):
        assert type(error) is RankMismatchError
        assert "local steps: 1 on rank 0, 2 on rank 1" in str(error)
