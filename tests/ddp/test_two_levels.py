"""Two levels: dense inside a node, compressed between nodes, each node as one rank."""

import copy
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import torchcomp
from tests.support.cases import only
from tests.support.models import (
    METHODS,
    SMALL_BUCKETS,
    THROUGH_DDP,
    Branches,
    Gradients,
    convolutions,
    gradients,
    images,
    local_gradients,
    loss_of,
    mlp,
    rows,
    seeded,
    weights,
    wrap,
)
from tests.support.outcomes import (
    assert_close,
    assert_replicas_equal,
    flat,
    messages,
    raised_by,
    reloaded,
    same,
    unsent,
)
from tests.support.ranks import on_processes, on_threads
from torchcomp import run_in_process
from torchcomp.exchange import InsideExchange

STEPS = 3
NOW = ["ef(topk(0.1))", "bidirectional(topk(0.1), topk(0.1))", "powersgd(rank=1)"]
Grid = list[list[int]]


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
    size = len(grid[0])
    by_step = [node_means(by_rank, grid) for by_rank in steps]
    pieces: list[list[Gradients]] = []
    for position in range(size):

        def average(exchange: torchcomp.Exchange, at: int = position) -> list[Gradients]:
            def own(step: int) -> Gradients:
                mine = by_step[step][exchange.rank]
                return {name: piece(value, at, size) for name, value in mine.items()}

            averager, means = torchcomp.Averager(spec, exchange, own(0), groups), []
            for step in range(len(by_step)):
                means.append(own(step))
                averager.average_all(means[-1])
            return means

        pieces.append(run_in_process(len(grid), average)[0])
    return [
        {
            name: torch.cat([means[step][name] for means in pieces])[: len(value)]
            for name, value in by_step[step][0].items()
        }
        for step in range(len(by_step))
    ]


def averaged(
    spec: str,
    nodes: Any,
    build: Callable[[], nn.Module],
    batch: Any,
    inside: str | None = None,
    **options: Any,
) -> Any:
    """This rank's local gradients and averaged gradients of each step, and the groups."""
    module = build()
    model = wrap(copy.deepcopy(module), **options)
    handle = torchcomp.register(model, spec, nodes=nodes, inside=inside)
    own, means = [], []
    for step in range(STEPS):
        own.append(local_gradients(module, (batch(step),)))
        model.zero_grad()
        loss_of(model(batch(step))).backward()
        means.append(gradients(model))
    handle.close()
    return own, means, handle.averager.groups, handle.stats


def check_twin(found: list[Any], spec: str, grid: Grid) -> None:
    steps = [[own[step] for own, *_ in found] for step in range(STEPS)]
    expected = twin(spec, found[0][2], steps, grid)
    for _, means, *_ in found:
        for mine, wanted in zip(means, expected, strict=True):
            assert_close(flat(mine.values()), flat(wanted.values()))
    assert_replicas_equal([flat(means[-1].values()) for _, means, *_ in found])


@pytest.mark.parametrize("spec", only(METHODS, now=THROUGH_DDP))
def test_equals_the_flat_method_of_nodes_with_their_mean_gradient(spec: str) -> None:
    options = {"bucket_cap_mb": SMALL_BUCKETS}
    found = on_threads(4, lambda: averaged(spec, 2, mlp, rows, **options))
    check_twin(found, spec, [[0, 1], [2, 3]])


@pytest.mark.parametrize("spec", ["mean", "ef(topk(0.1))", "bidirectional(topk(0.1), topk(0.1))"])
def test_bf16_inside_rounds_gradients_and_means(spec: str) -> None:
    def rounded(values: Gradients) -> Gradients:
        return {name: value.bfloat16().double() for name, value in values.items()}

    found = on_threads(4, averaged, spec, 2, mlp, rows, "bf16")
    steps = [[rounded(own[step]) for own, *_ in found] for step in range(STEPS)]
    expected = twin(spec, found[0][2], steps, [[0, 1], [2, 3]])
    for _, means, _, stats in found:
        for mine, wanted in zip(means, map(rounded, expected), strict=True):
            assert all(same(mine[name], wanted[name]) for name in wanted)
        assert stats.inside_bytes_sent == 2 * sum(value.numel() for value in means[0].values())
    assert_replicas_equal([flat(means[-1].values()) for _, means, *_ in found])


@pytest.mark.parametrize(("nodes", "ranks"), [(3, 6), (4, 4), (3, 3), (2, 6), (5, 10)])
def test_any_size_of_a_node(nodes: int, ranks: int) -> None:
    # Layers of 16 and 4 rows are cut into 3 and 5 pieces.
    spec = "ef(topk(0.1))"
    found = on_threads(ranks, lambda: averaged(spec, nodes, mlp, rows))
    check_twin(found, spec, [list(range(at, at + nodes)) for at in range(0, ranks, nodes)])


def test_nodes_of_one_rank_are_the_flat_method() -> None:
    flat_run = on_threads(4, lambda: averaged("ef(topk(0.1))", None, mlp, rows))
    found = on_threads(4, lambda: averaged("ef(topk(0.1))", 1, mlp, rows))
    for (_, means, *_), (_, expected, *_) in zip(found, flat_run, strict=True):
        assert all(map(same, means, expected))


def test_a_mesh_names_the_nodes() -> None:
    grid = [[0, 2], [3, 1]]
    found = on_processes(4, _with_mesh, grid)
    check_twin([run for run, _ in found], "ef(topk(0.1))", grid)
    assert all(resumes for _, resumes in found)


def _with_mesh(grid: Grid) -> Any:
    mesh = DeviceMesh("cpu", torch.tensor(grid), mesh_dim_names=("node", "local"))
    spec = "ef(topk(0.1))"
    run, resumed = Run(spec, mesh), Run(spec, mesh)
    run.step(0)
    resumed.model.load_state_dict(run.model.state_dict())
    resumed.handle.load_gathered(run.handle.gather_state_dict(dst=None))
    for each in (run, resumed):
        each.step(1)
    resumes = torch.equal(weights(run.model), weights(resumed.model))
    return averaged(spec, mesh, mlp, rows), resumes


def test_auto_reads_what_torchrun_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = on_threads(4, lambda: averaged("ef(topk(0.1))", "auto", mlp, rows))
    check_twin(found, "ef(topk(0.1))", [[0, 1], [2, 3]])


@pytest.mark.parametrize("spec", ["ef(topk(0.1))", "powersgd(rank=1)"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolutions_in_both_memory_formats(spec: str, memory_format: torch.memory_format) -> None:
    def build() -> nn.Module:
        return convolutions().to(memory_format=memory_format)

    found = on_threads(4, lambda: averaged(spec, 2, build, images))
    if memory_format is torch.contiguous_format:
        check_twin(found, spec, [[0, 1], [2, 3]])
    assert_replicas_equal([flat(means[-1].values()) for _, means, *_ in found])


def test_threads_of_processes_overlap_and_give_the_same_bits() -> None:
    spec = 'bidirectional(topk(0.1), topk(0.1), selection="exact")'
    with_overlap = on_processes(4, averaged, spec, 2, mlp, rows)
    inline = on_threads(4, averaged, spec, 2, mlp, rows)
    for (_, means, *_), (_, expected, *_) in zip(with_overlap, inline, strict=True):
        assert all(map(same, means, expected))


def test_a_numpy_twin_of_error_feedback() -> None:
    """One group, TopK of each piece, written out."""
    found = on_threads(4, lambda: averaged("ef(topk(0.1))", 2, _Weight, rows))
    steps = [[own[step]["weight"] for own, *_ in found] for step in range(STEPS)]
    residual = torch.zeros(2, 2, 8 * 16, dtype=torch.float64)  # node, position, elements
    for step, by_rank in enumerate(steps):
        mean = torch.zeros(2, 8 * 16, dtype=torch.float64)
        for node in range(2):
            pair = (by_rank[2 * node] + by_rank[2 * node + 1]) / 2
            for position in range(2):
                error = residual[node, position]
                error += pair[8 * position : 8 * position + 8].reshape(-1)
                chosen = error.abs().topk(13).indices  # 10 % of 128 elements, rounded up
                mean[position, chosen] += error[chosen] / 2
                error[chosen] = 0
        for _, means, *_ in found:
            assert_close(means[step]["weight"], mean.view(16, 16))


class _Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


# --- Errors, checkpoints, options ---


class Run:
    """A model that trains with two levels."""

    def __init__(self, spec: str, nodes: Any, **options: Any) -> None:
        self.model = wrap(mlp(), bucket_cap_mb=SMALL_BUCKETS)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.handle = torchcomp.register(self.model, spec, nodes=nodes, **options)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model(rows(step))).backward()
        self.optimizer.step()


@pytest.mark.parametrize("spec", ["ef(topk(0.1))", 'ef(quantize("int8"))', "powersgd(rank=1)"])
@pytest.mark.parametrize("check", ["now", "late"])
def test_a_nan_on_one_rank_raises_on_all_and_names_it(spec: str, check: str) -> None:
    def body() -> tuple[Exception, bool]:
        run = Run(spec, 2, check=check)
        run.step(0)
        before = run.handle.state_dict()
        hook = run.model.module[4].weight.register_hook(
            lambda gradient: gradient * float("nan") if dist.get_rank() == 2 else gradient
        )

        def fail() -> None:
            loss_of(run.model(rows(1))).backward()
            hook.remove()
            loss_of(run.model(rows(2))).backward()

        error = raised_by(fail)
        hook.remove()
        after = run.handle.state_dict()
        return error, same(before["slots"], after["slots"])

    for error, unchanged in on_threads(4, body):
        assert isinstance(error, torchcomp.NonFiniteError)
        assert "'4.weight' on rank 2" in str(error)
        assert not any(f"on rank {rank}" in str(error) for rank in (0, 1, 3))
        assert unchanged


def failed_after_the_end_of_a_step() -> tuple[str, bool]:
    run = Run("ef(topk(0.1))", 2)
    for step in range(2):
        run.step(step)
    before = reloaded(run.handle.state_dict())

    def lost(exchange: InsideExchange, message: Tensor) -> Tensor:
        while run.handle.averager.step == before["step"]:
            time.sleep(0.01)
        raise torchcomp.RankFailureError("lost")

    with mock.patch.object(InsideExchange, "all_gather_rows", lost):
        error = raised_by(lambda: run.step(2))
    after = run.handle.state_dict()
    return type(error).__name__, same({**before, "traffic": None}, {**after, "traffic": None})


def test_a_failure_after_the_end_of_a_step_discards_it() -> None:
    assert on_processes(4, failed_after_the_end_of_a_step) == 4 * [("RankFailureError", True)]


@pytest.mark.parametrize("spec", only(THROUGH_DDP, now=NOW))
def test_resumes_bit_for_bit(spec: str) -> None:
    def body(states: list[Any] | None, start: int, stop: int) -> Any:
        run = Run(spec, 2)
        if states is not None:
            saved, state = states[dist.get_rank()]
            run.model.load_state_dict(saved)
            run.handle.load_state_dict(reloaded(state))
        for step in range(start, stop):
            run.step(step)
        return copy.deepcopy(run.model.state_dict()), run.handle.state_dict()

    whole = on_threads(4, body, None, 0, 6)
    resumed = on_threads(4, body, on_threads(4, body, None, 0, 3), 3, 6)
    for (model, state), (model_again, state_again) in zip(whole, resumed, strict=True):
        assert same(model, model_again)
        assert same(state["slots"], state_again["slots"])


@pytest.mark.parametrize("spec", only(NOW, now=NOW[1:2]))
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, 2), (6, 3)),
        ((4, 2), (6, 2)),
        ((6, 3), (4, None)),
        ((4, None), (4, 2)),
        ((4, 2), (4, 4)),
    ],
)
def test_another_number_of_ranks_and_of_nodes_loses_nothing(
    spec: str, before: Any, after: Any
) -> None:
    def train(states: list[Any] | None, nodes: Any) -> Any:
        run = Run(spec, nodes)
        if states is not None:
            run.handle.load_state_dict(states[dist.get_rank()])
        first = run.handle.state_dict()
        for step in range(3):
            run.step(step)
        return first, run.handle.state_dict(), weights(run.model)

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

    for gradient in on_threads(4, body):
        assert torch.equal(gradient, torch.full_like(gradient, 40_000.0))


def test_unused_parameters_are_as_in_ddp() -> None:
    def body() -> list[Any]:
        found = []
        for registered_one in (True, False):
            model = wrap(seeded(Branches().double()), find_unused_parameters=True)
            if registered_one:
                torchcomp.register(model, "mean", nodes=2)
            for step, used in enumerate([("left",), ("left", "right"), ("right",), ()]):
                model.zero_grad()
                loss_of(model(rows(step), used)).backward()
                found.append([p.grad for p in model.parameters()])
        return found

    for found in on_threads(4, body):
        for ours, plain in zip(found[:4], found[4:], strict=True):
            for mine, wanted in zip(ours, plain, strict=True):
                assert (mine is None) == (wanted is None)
                if wanted is not None:
                    assert_close(mine, wanted)


def test_a_scaler_skips_the_step_on_all_ranks() -> None:
    def body() -> tuple[bool, float, Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        run = Run("ef(topk(0.1))", 2, scaler=scaler)
        taken = []
        for step in range(4):
            run.optimizer.zero_grad()
            before = weights(run.model)
            factor = 1e308 if step == 2 and dist.get_rank() == 1 else 1.0
            scaler.scale(loss_of(run.model(rows(step))) * factor).backward()
            scaler.step(run.optimizer)
            scaler.update()
            taken.append(not torch.equal(before, weights(run.model)))
        return taken == [True, True, False, True], scaler.get_scale(), weights(run.model)

    found = on_threads(4, body)
    assert all(as_expected and scale == 2.0**9 for as_expected, scale, _ in found)
    assert_replicas_equal([weight for *_, weight in found])


def test_bytes_are_those_of_the_method_between_nodes() -> None:
    (_, _, _, stats), *_ = on_threads(4, lambda: averaged("ef(topk(0.1))", 2, mlp, rows))
    (_, _, _, flat_stats), *_ = on_threads(4, lambda: averaged("ef(topk(0.1))", None, mlp, rows))
    numel = sum(parameter.numel() for parameter in mlp().parameters())
    # A rank sends half a message to one other rank, instead of a message to three.
    assert stats.bytes_sent < 0.27 * flat_stats.bytes_sent
    assert stats.inside_bytes_sent == numel * 8
    assert stats.dense_bytes_sent == flat_stats.dense_bytes_sent // 2
    assert flat_stats.inside_bytes_sent == 0
    assert messages(stats).total_inside_bytes_sent == STEPS * stats.inside_bytes_sent


def test_ranks_that_disagree_are_refused_and_nothing_changes() -> None:
    def body() -> tuple[Exception, Tensor]:
        model = wrap(mlp())
        nodes = 2 if dist.get_rank() else 4
        error = raised_by(lambda: torchcomp.register(model, "ef(topk(0.1))", nodes=nodes))
        torchcomp.register(model, "ef(topk(0.1))", nodes=2)
        loss_of(model(rows(0))).backward()
        return error, flat(gradients(model).values())

    found = on_threads(4, body)
    assert all(isinstance(error, torchcomp.RankMismatchError) for error, _ in found)
    assert_replicas_equal([gradient for _, gradient in found])


def after_a_flush(reads: bool) -> Tensor:
    run = Run("ef(topk(0.1))", 2)
    for step in range(2):
        run.step(step)
    # Selects over the whole model: after the flush, there is another bucket.
    run.handle.swap('topk(0.1, scope="model")')
    for step in range(2, 5):
        run.step(step)
        if reads:
            run.handle.state_dict()
    return weights(run.model)


def test_the_first_step_after_a_flush_has_the_groups_of_the_new_method() -> None:
    assert same(on_threads(4, after_a_flush, False), on_threads(4, after_a_flush, True))
