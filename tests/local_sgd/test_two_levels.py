"""Two levels: gradients are reduced inside each node, and parameters averaged across nodes."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.local_sgd import reference
from tests.local_sgd.hierarchy import NODES, PER_NODE, TOTAL, Hierarchy, groups
from tests.local_sgd.script import batch, constant, float32_mlp, loss_of, mlp
from tests.support.models import kept
from tests.support.outcomes import (
    assert_close,
    caught,
    equal_on_all,
    flat,
    raised_by,
    reloaded,
    same,
)
from tests.support.ranks import on_processes, on_threads
from torchcomp.reference import average, top

TOPK = "ef(topk(0.1))"
BIDIRECTIONAL = 'bidirectional(topk(0.2), topk(0.2), selection="exact")'
SYNCS = (3, 6, 8)
"""The steps after which all ranks have the same weights."""


def of_a_mesh():
    mesh = init_device_mesh("cpu", (NODES, PER_NODE), mesh_dim_names=("node", "local"))
    return mesh["local"].get_group(), mesh["node"]


def weights_of(**options):
    return Hierarchy(**options).train()


def assert_nodes_are_equal_and_ranks_at(syncs, runs, first=1):
    """Require equal ranks of a node after each step, and equal nodes after those in `syncs`."""
    half = len(runs) // 2
    for step, weights in enumerate(zip(*runs, strict=True), first):
        assert equal_on_all(weights[:half])
        assert equal_on_all(weights[half:])
        assert equal_on_all(weights) == (step in syncs)


class Node(reference.Worker):
    """A node whose ranks exchange the `k` largest entries of each tensor, with error feedback."""

    def __init__(self, node, k):
        super().__init__(node, reference.Momentum())
        self.k = k
        self.residuals = [[torch.zeros_like(w) for w in self.weights] for _ in range(PER_NODE)]

    def _gradients(self, step):
        total = [torch.zeros_like(w) for w in self.weights]
        for position, residual in enumerate(self.residuals):
            loss = loss_of(self.module, *batch(PER_NODE * self.rank + position, step))
            own = torch.autograd.grad(loss, list(self.module.parameters()))
            for index, gradient in enumerate(own):
                wanted = residual[index] + gradient
                sent = top(wanted, self.k)
                residual[index] = wanted - sent
                total[index] += sent / PER_NODE
        return total


@pytest.mark.parametrize(
    ("options", "k"),
    [
        ({}, 100),
        ({"make": of_a_mesh, "compress": "ef(identity)"}, 100),
        ({"inside": "mean"}, 100),
        ({"inside": 'ef(topk(k=3, scope="tensor"))'}, 3),
    ],
)
def test_equals_the_float64_reference_at_every_step(options, k):
    runs = on_threads(2 * PER_NODE, partial(weights_of, **options))
    crew = [Node(node, k) for node in range(NODES)]
    for step, actual in enumerate(zip(*runs, strict=True)):
        for node in crew:
            node.step(step, constant(step))
        if step + 1 in SYNCS:
            average(crew, 0.0)
        for rank, mine in enumerate(actual):
            assert_close(mine, flat(crew[rank // PER_NODE].weights))


@pytest.mark.parametrize(
    ("launch", "options"),
    [
        (on_threads, {"ddp": {"static_graph": True}}),
        (on_processes, {"inside": BIDIRECTIONAL, "overlap": True}),
    ],
)
def test_ranks_of_a_node_are_always_equal_and_nodes_differ_within_a_round(launch, options):
    runs = launch(4, partial(weights_of, build=float32_mlp, **options))
    assert_nodes_are_equal_and_ranks_at(SYNCS, runs)


def test_a_resumed_run_is_bit_identical_and_each_level_has_its_own_residuals():
    def body():
        options = {"inside": TOPK, "compress": TOPK, "outer": "slowmo(beta=0.7)"}
        whole, first, again = (Hierarchy(**options) for _ in range(3))
        expected = whole.train()
        first.train(0, 4)
        again.load(reloaded(first.save()))
        again.handle.load_state_dict(reloaded(first.handle.state_dict()))
        weights = again.train(4, TOTAL)
        errors = [flat(kept(part.state_dict()).values()) for part in (again.sync, again.handle)]
        return expected, same(weights, expected[4:]), *errors

    runs, resumed, across, inside = zip(*on_threads(4, body), strict=True)
    assert resumed == (True,) * 4
    assert_nodes_are_equal_and_ranks_at(SYNCS, runs)
    assert equal_on_all(across[:2])
    assert not equal_on_all(inside[:2])


# --- Loss scaling and NaN -------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [None, TOPK])
def test_an_overflow_skips_the_step_of_its_node_and_keeps_the_residuals(inside):
    def body():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        script = Hierarchy(inside=inside, register={"scaler": scaler}, scaler=scaler)
        weights, residuals = [], []
        for step in range(TOTAL):
            overflows = (script.rank, step) == (1, 4)
            weights.append(script.step(step, float("inf") if overflows else 1.0))
            state = script.handle.state_dict() if inside else {"slots": {}, "scale": 1.0}
            residuals.append([each / state["scale"] for each in kept(state).values()])
        return weights, residuals, scaler.get_scale()

    runs = on_threads(4, body)
    for rank, (weights, residuals, scale) in enumerate(runs):
        hit = rank < PER_NODE
        assert torch.equal(weights[3], weights[4]) == hit
        assert inside is None or same(residuals[3], residuals[4]) == hit
        assert scale == (2.0 if hit else 4.0)
    assert_nodes_are_equal_and_ranks_at(SYNCS, [weights for weights, *_ in runs])


def poisoned_parameter(inside):
    """The error of a step that averages, before which rank 3's parameters are damaged."""
    script = Hierarchy(build=float32_mlp, inside=inside)
    script.train(0, 2)
    script.backward(2)
    if script.rank == 3:
        nn.init.constant_(script.model.module[0].bias.detach(), float("nan"))
    error = raised_by(script.optimizer.step)
    return error, script.handle is None or script.handle.state_dict()["step"]


@pytest.mark.parametrize(("launch", "inside"), [(on_threads, None), (on_processes, TOPK)])
def test_nan_in_a_parameter_raises_on_the_ranks_of_both_levels(launch, inside):
    outcomes = launch(4, poisoned_parameter, inside)
    errors = (torchcomp.NonFiniteError, torchcomp.RankMismatchError)
    for error, steps in outcomes:
        assert isinstance(error, errors), error
        assert steps == (3 if inside else True)  # the gradients' step counts
    assert any("'0.bias' on rank 3" in str(error) for error, _ in outcomes)


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


def with_groups(across):
    """The groups of a run, with another one across the nodes."""
    return lambda: (groups()[0], across())


def of_one_rank():
    inside, across = groups()
    return inside, across if dist.get_rank() in (1, 3) else None


def changed(change):
    """Build local steps of two levels on a model after `change` to it."""
    node, across = groups()
    model = DistributedDataParallel(mlp(), process_group=node)
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torchcomp.LocalSGD(model, optimizer, "every(3)", total_steps=4, process_group=across)


def remedied():
    script = Hierarchy(scaler=torch.amp.GradScaler("cpu"))
    script.sync.backward(lambda: loss_of(script.model, *batch(script.rank, 0)))


def registered_later():
    torchcomp.register(Hierarchy().model, TOPK)


def with_other_lr():
    Hierarchy(lr=0.05 if dist.get_rank() == 3 else 0.1).train()


UNSUPPORTED, WRONG = torchcomp.UnsupportedModelError, torchcomp.SpecError
REFUSED = [
    (partial(Hierarchy, with_groups(lambda: groups()[0])), WRONG, "share"),
    (partial(Hierarchy, with_groups(lambda: dist.group.WORLD)), WRONG, "[0, 1, 2, 3]"),
    (partial(Hierarchy, with_groups(lambda: "node")), WRONG, "process_group", "str"),
    (partial(changed, lambda m: torchcomp.register(m, TOPK).close()), UNSUPPORTED, "closed"),
    (partial(changed, lambda m: torchcomp.JointSpar(m, budget=0.5)), UNSUPPORTED, "JointSpar"),
    (partial(changed, lambda m: m.register_comm_hook(None, allreduce_hook)), UNSUPPORTED, "allred"),
    (remedied, UNSUPPORTED, "process_group", "scaler.step"),
    (registered_later, UNSUPPORTED, "call torchcomp.register first"),
    (with_other_lr, torchcomp.RankMismatchError, "0.05", "0.1"),
    (partial(Hierarchy, of_one_rank), torchcomp.RankMismatchError, "process_group: none on rank 0"),
]


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_two_levels(case):
    body, error, *words = case
    outcomes = on_threads(4, body, catch=True)
    assert [type(outcome) for outcome in outcomes] == [error] * 4
    assert [word for word in words if word not in str(outcomes[0])] == []
