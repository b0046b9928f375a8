"""Two levels: dense inside a node, compressed between nodes, each node as one rank."""

import copy
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import torchcomp
from tests.ddp.runs import TOPK, Run, without_traffic
from tests.support.cases import only
from tests.support.models import (
    METHODS,
    THROUGH_DDP,
    Gradients,
    convolutions,
    gradients,
    images,
    local_gradients,
    loss_of,
    mlp,
    rows,
    weights,
    wrap,
)
from tests.support.outcomes import (
    assert_close,
    assert_replicas_equal,
    flat,
    raised_by,
    reloaded,
    same,
    unsent,
)
from tests.support.ranks import on_processes, on_threads
from torchcomp import run_in_process
from torchcomp.exchange import InsideExchange

STEPS = 3
BOTH = "bidirectional(topk(0.1), topk(0.1))"
NOW = [TOPK, BOTH, "powersgd(rank=1)"]
Grid = list[list[int]]
PAIRS = [[0, 1], [2, 3]]


def node_means(by_rank: list[Gradients], grid: Grid) -> list[Gradients]:
    """The mean gradient of each node."""
    return [
        {name: sum(by_rank[rank][name] for rank in node) / len(node) for name in by_rank[0]}
        for node in grid
    ]


def piece(value: Tensor, position: int, ranks: int) -> Tensor:
    """One of `ranks` equal pieces of a parameter, cut along its first dimension."""
    each = -(-len(value) // ranks)
    rows_of = value[position * each : (position + 1) * each]
    return torch.cat([rows_of, value.new_zeros(each - len(rows_of), *value.shape[1:])])


def twin(spec: str, groups: Any, steps: list[list[Gradients]], grid: Grid) -> list[Gradients]:
    """The means of each step: the flat method run by nodes, with a selection in each piece."""
    size, by_step = len(grid[0]), [node_means(by_rank, grid) for by_rank in steps]

    def average(exchange: torchcomp.Exchange, at: int) -> list[Gradients]:
        means = [
            {name: piece(value, at, size) for name, value in nodes[exchange.rank].items()}
            for nodes in by_step
        ]
        averager = torchcomp.Averager(spec, exchange, means[0], groups)
        for mean in means:
            averager.average_all(mean)
        return means

    pieces = [run_in_process(len(grid), lambda e, at=at: average(e, at))[0] for at in range(size)]
    return [
        {
            name: torch.cat([means[step][name] for means in pieces])[: len(value)]
            for name, value in nodes[0].items()
        }
        for step, nodes in enumerate(by_step)
    ]


def averaged(
    spec: str = TOPK, nodes: Any = 2, build: Any = mlp, batch: Any = rows, inside: Any = None
) -> Any:
    """This rank's local gradients and averaged gradients of each step, and the groups."""
    module = build()
    run, own, means = Run(spec, copy.deepcopy(module), nodes=nodes, inside=inside), [], []
    for step in range(STEPS):
        own.append(local_gradients(module, (batch(step),)))
        run.model.zero_grad()
        loss_of(run.model(batch(step))).backward()
        means.append(gradients(run.model))
    run.handle.close()
    return own, means, run.handle.averager.groups, run.handle.stats


def check_twin(found: list[Any], spec: str = TOPK, grid: Grid = PAIRS) -> None:
    steps = [[own[step] for own, *_ in found] for step in range(STEPS)]
    expected = twin(spec, found[0][2], steps, grid)
    for _, means, *_ in found:
        for mine, wanted in zip(means, expected, strict=True):
            assert_close(flat(mine.values()), flat(wanted.values()))
    assert_replicas_equal([flat(means[-1].values()) for _, means, *_ in found])


@pytest.mark.parametrize("spec", only(METHODS, now=THROUGH_DDP))
def test_equals_the_flat_method_of_nodes_with_their_mean_gradient(spec: str) -> None:
    check_twin(on_threads(4, averaged, spec), spec)


@pytest.mark.parametrize("spec", ["mean", TOPK, BOTH])
def test_bf16_inside_rounds_gradients_and_means(spec: str) -> None:
    def rounded(values: Gradients) -> Gradients:
        return {name: value.bfloat16().double() for name, value in values.items()}

    found = on_threads(4, averaged, spec, 2, mlp, rows, "bf16")
    steps = [[rounded(own[step]) for own, *_ in found] for step in range(STEPS)]
    expected = list(map(rounded, twin(spec, found[0][2], steps, PAIRS)))
    for _, means, _, stats in found:
        assert same(means, expected)
        assert stats.inside_bytes_sent == 2 * sum(value.numel() for value in means[0].values())


@pytest.mark.parametrize(("nodes", "ranks"), [(3, 6), (4, 4), (5, 10)])
def test_any_size_of_a_node(nodes: int, ranks: int) -> None:
    # Layers of 16 and 4 rows are cut into 3 and 5 pieces.
    found = on_threads(ranks, averaged, TOPK, nodes)
    check_twin(found, TOPK, [list(range(at, at + nodes)) for at in range(0, ranks, nodes)])


def test_nodes_of_one_rank_are_the_flat_method() -> None:
    one, flat = (on_threads(4, averaged, TOPK, nodes) for nodes in (1, None))
    assert same([means for _, means, *_ in one], [means for _, means, *_ in flat])


def _with_mesh(grid: Grid) -> Any:
    return averaged(TOPK, DeviceMesh("cpu", torch.tensor(grid), mesh_dim_names=("node", "local")))


def test_a_mesh_names_the_nodes() -> None:
    grid = [[0, 2], [3, 1]]
    check_twin(on_processes(4, _with_mesh, grid), TOPK, grid)


def test_auto_reads_what_torchrun_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_twin(on_threads(4, averaged, TOPK, "auto"))


@pytest.mark.parametrize("spec", [TOPK, "powersgd(rank=1)"])
def test_convolutions(spec: str) -> None:
    def build() -> nn.Module:
        return convolutions().to(memory_format=torch.contiguous_format)

    check_twin(on_threads(4, averaged, spec, 2, build, images), spec)


def test_threads_of_processes_overlap_and_give_the_same_bits() -> None:
    spec = 'bidirectional(topk(0.1), topk(0.1), selection="exact")'
    with_overlap, inline = (run(4, averaged, spec) for run in (on_processes, on_threads))
    assert same([means for _, means, *_ in with_overlap], [means for _, means, *_ in inline])


# --- Errors, checkpoints, options ---


def failed_after_the_end_of_a_step() -> tuple[str, bool]:
    run = Run(nodes=2).train(0, 1)
    before = reloaded(run.state)

    def lost(exchange: InsideExchange, message: Tensor) -> Tensor:
        while run.handle.averager.step == before["step"]:
            time.sleep(0.01)
        raise torchcomp.RankFailureError("lost")

    with mock.patch.object(InsideExchange, "all_gather_rows", lost):
        error = raised_by(lambda: run.step(2))
    return type(error).__name__, same(without_traffic(before), without_traffic(run.state))


def test_a_failure_after_the_end_of_a_step_discards_it() -> None:
    assert on_processes(4, failed_after_the_end_of_a_step) == 4 * [("RankFailureError", True)]


RESIZED = ((4, 2), (6, 3)), ((4, 2), (6, 2)), ((6, 3), (4, None)), ((4, None), (4, 2))


@pytest.mark.parametrize("spec", only(NOW, now=NOW[1:2]))
@pytest.mark.parametrize(("before", "after"), RESIZED)
def test_another_number_of_ranks_and_of_nodes_loses_nothing(
    spec: str, before: Any, after: Any
) -> None:
    def train(states: list[Any] | None, nodes: Any) -> Any:
        run = Run(spec, nodes=nodes)
        if states is not None:
            run.handle.load_state_dict(states[dist.get_rank()])
        return run.state, run.train(0, 1, 2).state, run.weights

    ranks, nodes = before
    old = [state for _, state, _ in on_threads(ranks, train, None, nodes)]
    ranks, nodes = after
    found = on_threads(ranks, train, torchcomp.redistribute(old[::-1], ranks, nodes), nodes)
    assert unsent(old).any()
    assert_close(unsent([first for first, *_ in found]), unsent(old))
    assert_replicas_equal([weight for *_, weight in found])


def test_a_sum_beyond_float16_is_a_mean_within_it() -> None:
    def body() -> Tensor:
        model = wrap(nn.Linear(4, 4, bias=False).half())
        torchcomp.register(model, "mean", nodes=2)
        (model(torch.ones(1, 4, dtype=torch.float16)) * 40_000.0).sum().backward()
        return flat(gradients(model).values())

    assert all(gradient.eq(40_000.0).all() for gradient in on_threads(4, body))


def after_a_flush(reads: bool) -> Tensor:
    run = Run(nodes=2).train(0, 1)
    # Selects over the whole model: after the flush, there is another bucket.
    run.handle.swap('topk(0.1, scope="model")')
    for step in range(2, 5):
        run.step(step)
        if reads:
            run.handle.state_dict()
    return weights(run.model)


def test_the_first_step_after_a_flush_has_the_groups_of_the_new_method() -> None:
    assert same(on_threads(4, after_a_flush, False), on_threads(4, after_a_flush, True))
