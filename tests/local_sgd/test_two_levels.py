"""Two levels: reduce gradients inside each node, and average parameters across nodes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchcomp
from tests.local_sgd import reference
from tests.local_sgd.hierarchy import NODES, PER_NODE, TOTAL, Hierarchy, groups
from tests.local_sgd.script import (
    batch,
    constant,
    convnet,
    float32_mlp,
    half_frozen,
    loss_of,
    running_statistics,
)
from tests.support.outcomes import assert_close, assert_refused, equal_on_all
from tests.support.ranks import on_processes, on_threads


def of_a_mesh():
    mesh = init_device_mesh("cpu", (NODES, PER_NODE), mesh_dim_names=("node", "local"))
    return mesh["local"].get_group(), mesh["node"]


def weights_of(**options):
    return Hierarchy(**options).train()


class Node(reference.Worker):
    """The ranks of one node as one worker, which trains on the mean of their gradients."""

    def _gradients(self, step):
        first = PER_NODE * self.rank
        ranks = [reference.Worker._gradients(self._as(first + i), step) for i in range(PER_NODE)]
        return [torch.stack(each).mean(0) for each in zip(*ranks, strict=True)]

    def _as(self, rank):
        twin = object.__new__(reference.Worker)
        twin.rank, twin.module = rank, self.module
        return twin


def nodes_in_float64():
    crew = [Node(node, reference.Momentum()) for node in range(NODES)]
    for step in range(TOTAL):
        for node in crew:
            node.step(step, constant(step))
        if step + 1 in (3, 6, 8):
            reference.average(crew, 0.0)
        yield [torch.cat([w.flatten() for w in node.weights]) for node in crew]


@pytest.mark.parametrize("make", [groups, of_a_mesh])
@pytest.mark.parametrize("compress", ["mean", "ef(identity)"])
def test_equals_the_float64_reference_at_every_step(make, compress):
    runs = on_threads(4, partial(weights_of, make=make, compress=compress))
    for actual, nodes in zip(zip(*runs, strict=True), nodes_in_float64(), strict=True):
        for rank, mine in enumerate(actual):
            assert_close(mine, nodes[rank // PER_NODE])


def statistics_around_an_average():
    """BatchNorm's running statistics before and after the average of the third step."""
    script = Hierarchy(build=convnet, shape=(3, 4, 4))
    seen = []
    script.optimizer.register_step_pre_hook(
        lambda *_: seen.append(running_statistics(script.model))
    )
    script.train(0, 3)
    script.sync.wait()
    return seen[-1], running_statistics(script.model)


def test_running_statistics_are_averaged_across_nodes():
    before, after = zip(*on_threads(4, statistics_around_an_average), strict=True)
    for rank, mine in enumerate(after):
        others = [before[rank % PER_NODE], before[rank % PER_NODE + PER_NODE]]
        assert not torch.equal(*others)
        assert_close(mine, torch.stack(others).mean(0))


@pytest.mark.parametrize(
    ("launch", "compress"),
    [(on_threads, "mean"), (on_threads, "ef(topk(0.1))"), (on_processes, "ef(topk(0.1))")],
)
def test_ranks_of_a_node_are_always_equal_and_nodes_differ_within_a_round(launch, compress):
    runs = launch(4, partial(weights_of, build=float32_mlp, compress=compress))
    for step, weights in enumerate(zip(*runs, strict=True), 1):
        assert equal_on_all(weights[:2])
        assert equal_on_all(weights[2:])
        assert equal_on_all(weights) == (step in (3, 6, 8))


def test_bytes_are_those_between_the_nodes():
    def body():
        script = Hierarchy()
        script.train(0, 3)
        return script.sync.stats.bytes_sent

    assert on_threads(4, body) == [83 * 8] * 4


def test_a_resumed_run_is_bit_identical():
    def body():
        whole, cut, again = Hierarchy(), Hierarchy(), Hierarchy()
        expected = whole.train()
        cut.train(0, 4)
        again.model.module.load_state_dict(cut.model.module.state_dict())
        again.optimizer.load_state_dict(cut.optimizer.state_dict())
        again.sync.load_state_dict(cut.sync.state_dict())
        return torch.equal(torch.stack(again.train(4, TOTAL)), torch.stack(expected[4:]))

    assert on_threads(4, body) == [True] * 4


def test_an_overflow_reaches_the_whole_node_and_changes_no_step_count():
    def body():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        script = Hierarchy(scaler=scaler)
        overflows = (1, 4)
        return [
            script.step(step, float("inf") if (script.rank, step) == overflows else 1.0)
            for step in range(TOTAL)
        ]

    runs = on_threads(4, body)
    assert torch.equal(runs[0][3], runs[0][4])
    assert not torch.equal(runs[2][3], runs[2][4])
    for step, weights in enumerate(zip(*runs, strict=True), 1):
        assert equal_on_all(weights) == (step in (3, 6, 8))


def test_a_static_graph_works():
    for weights in zip(
        *on_threads(4, partial(weights_of, ddp={"static_graph": True})), strict=True
    ):
        assert equal_on_all(weights[:2])


def test_nan_on_one_rank_raises_on_the_ranks_of_both_levels():
    def body():
        script = Hierarchy()
        script.train(0, 2)
        if script.rank == 3:
            nn.init.constant_(script.model.module[0].bias.detach(), float("nan"))
        script.step(2)

    outcomes = on_threads(4, body, catch=True)
    errors = (torchcomp.NonFiniteError, torchcomp.RankMismatchError)
    assert all(isinstance(outcome, errors) for outcome in outcomes), outcomes
    assert any("'0.bias'" in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize("rank", [0, 3])
def test_learning_rates_that_differ_on_any_rank_are_found_on_all(rank):
    def body():
        Hierarchy(lr=0.05 if dist.get_rank() == rank else 0.1).train()

    assert_refused(4, body, torchcomp.RankMismatchError, "0.05", "0.1")


def of_the_node():
    return groups()[0], groups()[0]


def of_all_ranks():
    return groups()[0], dist.group.WORLD


def of_no_kind():
    return groups()[0], "node"


def of_a_plane():
    return of_a_mesh()[0], init_device_mesh("cpu", (NODES, PER_NODE))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (of_a_plane, ("process_group", "not DeviceMesh")),
        (of_the_node, ("process_group [0, 1]",)),
        (of_all_ranks, ("process_group [0, 1, 2, 3]",)),
        (of_no_kind, ("process_group", "not str")),
    ],
)
def test_a_group_that_is_not_across_the_nodes(make, words):
    outcomes = on_threads(4, partial(weights_of, make=make), catch=True)
    assert all(type(outcome) is torchcomp.SpecError for outcome in outcomes), outcomes
    for word in words:
        assert word in str(outcomes[0])


def test_a_group_that_only_one_rank_gives():
    def body():
        inside, across = groups()
        Hierarchy(make=lambda: (inside, across if dist.get_rank() == 1 else None))

    outcomes = on_threads(2 * PER_NODE, body, catch=True)
    assert type(outcomes[0]) is torchcomp.RankMismatchError
    assert "process_group: none on rank 0, set on rank 1" in str(outcomes[0])


def test_micro_batches_cannot_be_computed_again_on_one_rank_of_a_node():
    def body():
        script = Hierarchy(scaler=torch.amp.GradScaler("cpu"))
        script.sync.backward(lambda: loss_of(script.model, *batch(script.rank, 0)))

    assert_refused(4, body, torchcomp.UnsupportedModelError, "process_group", "scaler.step")


def test_a_layer_that_is_unfrozen_later_is_refused():
    def body():
        script = Hierarchy(build=half_frozen)
        script.model.module[0].requires_grad_(True)
        script.step(0)

    words = ("'0.weight'", "DistributedDataParallel")
    assert_refused(4, body, torchcomp.UnsupportedModelError, *words)
