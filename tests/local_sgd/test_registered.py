"""Local steps across nodes, with a gradient method inside the nodes."""

import copy
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.local_sgd import reference
from tests.local_sgd.hierarchy import NODES, PER_NODE, TOTAL, Hierarchy, groups
from tests.local_sgd.script import batch, constant, float32_mlp, loss_of, mlp
from tests.support.cases import only
from tests.support.models import kept
from tests.support.outcomes import (
    assert_close,
    assert_refused,
    caught,
    equal_on_all,
    flat,
    raised_by,
    reloaded,
    same,
)
from tests.support.ranks import on_processes, on_threads

TOPK = "ef(topk(0.1))"
BIDIRECTIONAL = 'bidirectional(topk(0.2), topk(0.2), selection="exact")'
SYNCS = (3, 6, 8)
"""The steps after which all ranks have the same weights."""


def weights_of(**options):
    return Hierarchy(**options).train()


class Node(reference.Worker):
    """A node whose ranks exchange the `k` largest entries of each tensor, with error feedback."""

    def __init__(self, node, k):
        super().__init__(node, reference.Momentum())
        self.k = k
        self.residuals = [[torch.zeros_like(w) for w in self.weights] for _ in range(PER_NODE)]

    def _gradients(self, step):
        total = [torch.zeros_like(w) for w in self.weights]
        for place, residual in enumerate(self.residuals):
            loss = loss_of(self.module, *batch(PER_NODE * self.rank + place, step))
            own = torch.autograd.grad(loss, list(self.module.parameters()))
            for index, gradient in enumerate(own):
                wanted = residual[index] + gradient
                sent = reference.top(wanted, self.k)
                residual[index] = wanted - sent
                total[index] += sent / PER_NODE
        return total


@pytest.mark.parametrize(
    ("spec", "k"),
    [("mean", 100), ("ef(identity)", 100), ('ef(topk(k=3, scope="tensor"))', 3)],
)
def test_equals_the_float64_reference_at_every_step(spec, k):
    runs = on_threads(2 * PER_NODE, partial(weights_of, inside=spec))
    crew = [Node(node, k) for node in range(NODES)]
    for step, actual in enumerate(zip(*runs, strict=True)):
        for node in crew:
            node.step(step, constant(step))
        if step + 1 in SYNCS:
            reference.average(crew, 0.0)
        for rank, mine in enumerate(actual):
            expected = crew[rank // PER_NODE].weights
            assert_close(mine, torch.cat([w.flatten() for w in expected]))


@pytest.mark.parametrize(
    ("launch", "inside", "local"),
    [
        (on_threads, TOPK, {}),
        (on_threads, TOPK, {"compress": TOPK, "outer": "slowmo(beta=0.7)"}),
        (on_threads, 'ef(quantize("int8"))', {"moments": "average"}),
        (on_threads, "powersgd(rank=1)", {"compress": "ef(topk(0.1))"}),
        (on_processes, BIDIRECTIONAL, {"overlap": True}),
    ],
)
def test_ranks_of_a_node_are_always_equal_and_nodes_differ_within_a_round(launch, inside, local):
    runs = launch(4, partial(weights_of, build=float32_mlp, inside=inside, **local))
    for step, weights in enumerate(zip(*runs, strict=True), 1):
        assert equal_on_all(weights[:2])
        assert equal_on_all(weights[2:])
        assert equal_on_all(weights) == (step in SYNCS)


def test_an_average_changes_no_residual_of_the_gradients():
    def body():
        script, seen = Hierarchy(inside=TOPK), []
        keep = lambda *_: seen.append(script.handle.state_dict())  # noqa: E731
        script.optimizer.register_step_pre_hook(keep)
        script.train(0, 3)
        return seen[-1], script.handle.state_dict()

    states = on_threads(4, body)
    for before, after in states:
        assert same(before, after)
    errors = [flat(kept(state).values()) for _, state in states]
    assert not any(torch.equal(errors[0], other) for other in errors[1:])


def test_each_counts_its_own_bytes():
    def body(inside):
        script = Hierarchy(inside=inside)
        script.train(0, 3)
        return script.sync.stats.bytes_sent, script.handle and script.handle.stats

    plain, both = on_threads(4, body, None)[0], on_threads(4, body, TOPK)[0]
    assert plain[0] == both[0] == 83 * 8
    assert both[1].steps == 3
    assert 0 < both[1].bytes_sent < 83 * 8


class Racks(Hierarchy):
    """Three levels on 8 ranks: nodes of two ranks, racks of two nodes, and two racks."""

    def __init__(self, **options):
        super().__init__(make=racks, inside=TOPK, register={"nodes": 2}, **options)


def racks():
    rank = dist.get_rank()
    inside = [dist.new_group(list(range(at, at + 4))) for at in (0, 4)]
    across = [dist.new_group([at, at + 4]) for at in range(4)]
    return inside[rank // 4], across[rank % 4]


def test_racks_of_nodes():
    def body():
        script = Racks(build=float32_mlp)
        return script.train(), script.handle.stats.inside_bytes_sent

    runs = on_threads(8, body)
    assert all(inside > 0 for _, inside in runs)
    for step, weights in enumerate(zip(*(run for run, _ in runs), strict=True), 1):
        assert equal_on_all(weights[:4])
        assert equal_on_all(weights[4:])
        assert equal_on_all(weights) == (step in SYNCS)


# --- Checkpoints ----------------------------------------------------------------------------------


def save(script):
    return copy.deepcopy(
        {
            "model": script.model.module.state_dict(),
            "optimizer": script.optimizer.state_dict(),
            "handle": script.handle.state_dict(),
            "sync": script.sync.state_dict(),
        }
    )


def load(script, saved):
    script.model.module.load_state_dict(saved["model"])
    script.optimizer.load_state_dict(saved["optimizer"])
    script.handle.load_state_dict(saved["handle"])
    script.sync.load_state_dict(saved["sync"])


@pytest.mark.parametrize(
    "inside", only([TOPK, BIDIRECTIONAL, "powersgd(rank=1)"], now=[TOPK, "powersgd(rank=1)"])
)
@pytest.mark.parametrize("cut", only([4, 6], now=[4]))
def test_a_resumed_run_is_bit_identical(inside, cut):
    def body():
        options = {"inside": inside, "compress": TOPK, "outer": "slowmo(beta=0.7)"}
        whole, first, again = (Hierarchy(**options) for _ in range(3))
        expected = whole.train()
        first.train(0, cut)
        load(again, reloaded(save(first)))
        states = lambda script: [s.state_dict()["slots"] for s in (script.handle, script.sync)]  # noqa: E731
        weights = again.train(cut, TOTAL)
        return same(weights, expected[cut:]), same(states(again), states(whole))

    assert on_threads(4, body) == [(True, True)] * 4


def test_three_levels_resume_bit_for_bit():
    def body():
        whole, first, again = Racks(), Racks(), Racks()
        expected = whole.train()
        first.train(0, 4)
        load(again, reloaded(save(first)))
        return same(again.train(4, TOTAL), expected[4:])

    assert on_threads(8, body) == [True] * 8


def test_one_file_can_hold_the_states_of_all_ranks_of_both_levels():
    def body():
        whole, first, again = (Hierarchy(inside=TOPK, compress=TOPK) for _ in range(3))
        expected = whole.train()
        first.train(0, 4)

        def gathered(script):
            node = torchcomp.Gathered(script.handle, dst=None)
            others = {"model": script.model, "optimizer": script.optimizer, "handle": node}
            return torchcomp.Gathered(script.sync, **others)

        shared = [gathered(first).state_dict()]
        written = [state is not None for state in shared]
        dist.broadcast_object_list(shared, src=0)
        gathered(again).load_state_dict(reloaded(shared[0]))
        return written, same(again.train(4, TOTAL), expected[4:])

    assert on_threads(4, body) == [([rank == 0], True) for rank in range(4)]


# --- Loss scaling and NaN -------------------------------------------------------------------------


def test_an_overflow_skips_the_step_of_its_node_and_keeps_the_residuals():
    def body():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        script = Hierarchy(inside=TOPK, register={"scaler": scaler}, scaler=scaler)
        weights, residuals = [], []
        for step in range(TOTAL):
            overflows = (script.rank, step) == (1, 4)
            weights.append(script.step(step, float("inf") if overflows else 1.0))
            state = script.handle.state_dict()
            residuals.append(flat(kept(state).values()) / state["scale"])
        return weights, residuals, scaler.get_scale()

    runs = on_threads(4, body)
    for rank, (weights, residuals, scale) in enumerate(runs):
        hit = rank < PER_NODE
        assert torch.equal(weights[3], weights[4]) == hit
        assert torch.equal(residuals[3], residuals[4]) == hit
        assert scale == (2.0 if hit else 4.0)
    for step, weights in enumerate(zip(*(run[0] for run in runs), strict=True), 1):
        assert equal_on_all(weights[:2])
        assert equal_on_all(weights) == (step in SYNCS)


def poisoned_parameter(inside, **options):
    """The errors of a step that averages, before which rank 3's parameters are damaged."""
    script = Hierarchy(inside=inside, build=float32_mlp, **options)
    script.train(0, 2)
    before = script.handle.state_dict()
    script.backward(2)
    if script.rank == 3:
        nn.init.constant_(script.model.module[0].bias.detach(), float("nan"))
    error = raised_by(script.optimizer.step)
    return error, kept(before) and script.handle.state_dict()["step"] == before["step"] + 1


@pytest.mark.parametrize(
    ("launch", "local"), [(on_threads, {}), (on_threads, {"compress": TOPK}), (on_processes, {})]
)
def test_nan_in_a_parameter_raises_on_the_ranks_of_both_levels(launch, local):
    outcomes = launch(4, partial(poisoned_parameter, TOPK, **local))
    errors = (torchcomp.NonFiniteError, torchcomp.RankMismatchError)
    for error, counted in outcomes:
        assert isinstance(error, errors), error
        assert counted
    assert any("'0.bias' on rank 3" in str(error) for error, _ in outcomes)


def dropped_batch(register):
    """A run whose scripts drop the batch of step 4, in which rank 3 has a NaN."""
    script, weights, found = Hierarchy(inside=TOPK, register=register), [], None
    for step in range(TOTAL):
        bad = (script.rank, step) == (3, 4)
        before = kept(script.handle.state_dict())
        error = caught(partial(script.backward, step, float("nan") if bad else 1.0))
        if error is not None:
            found = error, same(before, kept(script.handle.state_dict()))
            script.optimizer.zero_grad()
        # The step counts, although it has no gradients.
        script.optimizer.step()
        weights.append(flat(script.model.parameters()))
    return weights, found


@pytest.mark.parametrize(
    ("launch", "register"), [(on_threads, {}), (on_threads, {"nodes": 2}), (on_processes, {})]
)
def test_nan_in_a_gradient_raises_on_the_ranks_of_its_node(launch, register):
    runs = launch(4, partial(dropped_batch, register))
    assert [found is not None for _, found in runs] == [False, False, True, True]
    for error, unchanged in (found for _, found in runs[2:]):
        assert type(error) is torchcomp.NonFiniteError
        assert "on rank 3" in str(error)
        assert "on rank 2" not in str(error)
        assert unchanged
    for step, weights in enumerate(zip(*(weights for weights, _ in runs), strict=True), 1):
        assert equal_on_all(weights[2:])
        assert equal_on_all(weights) == (step in SYNCS)


def ends_after_an_error():
    script = Hierarchy(inside=TOPK)
    for step in range(TOTAL):
        poisoned = (script.rank, step) == (3, 4)
        error = caught(partial(script.backward, step, float("nan") if poisoned else 1.0))
        if isinstance(error, torchcomp.NonFiniteError):
            os._exit(7)
        script.optimizer.step()


def test_the_other_nodes_do_not_wait_for_one_that_has_ended():
    outcomes = on_processes(4, ends_after_an_error, catch=True)
    assert all(isinstance(outcome, RuntimeError) for outcome in outcomes)
    assert ["exit code 7" in str(outcome) for outcome in outcomes] == [False, False, True, True]


# --- What is refused ------------------------------------------------------------------------------


def refuses(change, *words):
    """Require that LocalSGD refuses a model in two levels, after `change` to it."""

    def body():
        node, across = groups()
        model = DistributedDataParallel(mlp(), process_group=node)
        change(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torchcomp.LocalSGD(model, optimizer, "every(3)", total_steps=4, process_group=across)

    assert_refused(4, body, torchcomp.UnsupportedModelError, *words)


def test_a_closed_handle():
    change = lambda model: torchcomp.register(model, TOPK).close()  # noqa: E731
    refuses(change, TOPK, "closed", "DistributedDataParallel")


def test_jointspar():
    refuses(lambda model: torchcomp.JointSpar(model, budget=0.5), "torchcomp.JointSpar")


def test_another_communication_hook():
    refuses(lambda model: model.register_comm_hook(None, allreduce_hook), "allreduce_hook")


def test_a_second_local_sgd():
    def body():
        script = Hierarchy(inside=TOPK)
        across = groups()[1]
        options = {"total_steps": 4, "process_group": across}
        torchcomp.LocalSGD(script.model, script.optimizer, "every(2)", **options)

    assert_refused(4, body, torchcomp.UnsupportedModelError, "LocalSGD('every(3)')", "close()")


def test_a_method_that_is_registered_after_local_steps():
    def body():
        script = Hierarchy()
        error = raised_by(lambda: torchcomp.register(script.model, TOPK))
        script.train(0, 3)
        return error, script.sync.next_sync

    for error, next_sync in on_threads(4, body):
        assert type(error) is torchcomp.UnsupportedModelError
        assert "torchcomp.register before LocalSGD" in str(error)
        assert next_sync is None


def test_the_method_remains_after_local_steps_and_can_be_swapped_at_any_time():
    def body():
        script = Hierarchy(inside=TOPK)
        script.train(0, 2)
        script.handle.swap("powersgd(rank=1)")
        script.train(2, 3)
        script.sync.close()
        error = raised_by(lambda: torchcomp.register(script.model, TOPK))
        options = {"total_steps": 2, "process_group": groups()[1]}
        script.sync = torchcomp.LocalSGD(script.model, script.optimizer, "every(2)", **options)
        weights = script.train(3, 5)
        script.sync.close()
        return error, [*weights, *script.train(5, 7)], script.handle.stats.steps

    runs = on_threads(4, body)
    assert all("torchcomp.register('ef(topk" in str(error) for error, *_ in runs)
    assert [steps for *_, steps in runs] == [7] * 4
    for step, weights in enumerate(zip(*(weights for _, weights, _ in runs), strict=True), 4):
        assert equal_on_all(weights[:2])
        assert equal_on_all(weights) == (step == 5)
