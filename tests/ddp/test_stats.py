"""Statistics: counted bytes equal those of the plan, and norms are those of the residual."""

import logging

import pytest
import torch
import torch.distributed as dist

import torchcomp
from tests.support.models import (
    METHODS,
    loss_of,
    mlp,
    rows,
    wrap,
)
from tests.support.ranks import on_threads, with_fake_ranks
from tests.support.threads import snapshots
from torchcomp.exchange import ProcessGroupExchange

STEPS = 3


def counted(spec: str, world_size: int) -> None:
    """Compare the counters of a run with the plan, computed before from the DDP model."""
    model = wrap(mlp(torch.float32))
    plan = torchcomp.explain(spec, model=model, world_size=world_size, rank=dist.get_rank())
    handle = torchcomp.register(model, spec)
    assert handle.stats == torchcomp.Stats(*[0] * 12)
    for step in range(STEPS):
        loss_of(model(rows(step, torch.float32))).backward()
        stats = handle.stats
        assert stats.steps == stats.syncs == step + 1
        assert stats.bytes_sent == plan.bytes_sent
        assert stats.bytes_received == plan.bytes_received
        assert stats.dense_bytes_sent == plan.dense_bytes_sent
    assert stats.total_bytes_sent == STEPS * plan.bytes_sent
    assert stats.total_bytes_received == STEPS * plan.bytes_received
    assert stats.total_dense_bytes_sent == STEPS * plan.dense_bytes_sent
    elements = sum(p.numel() for p in model.parameters())
    assert stats.dense_bytes_sent == 2 * (world_size - 1) * 4 * elements // world_size


def sized_by_values(spec: str) -> bool:
    """Whether the sizes of messages depend on the values, so that the plan is only an estimate."""
    method = torchcomp.parse(spec)
    return 'exchange="sharded"' in spec or getattr(method, "selection", "shard") == "exact"


# A warm-up's plan is that of its last stage: see tests/aggregators/test_warmup.py.
FIXED = tuple(s for s in METHODS if not sized_by_values(s) and "warmup" not in s)


@pytest.mark.parametrize("spec", FIXED)
def test_counted_bytes_equal_the_plan(spec: str) -> None:
    for world_size in (2, 3):
        on_threads(world_size, counted, spec, world_size)


FAKED = (
    *(spec for spec in FIXED if "bidirectional" not in spec and "topk" not in spec),
    'mean(topk(0.1), exchange="allgather")',
    'ef(topk(k=3, scope="tensor"), exchange="allgather")',
)


@pytest.mark.parametrize("spec", FAKED)
def test_counted_bytes_equal_the_plan_on_64_ranks(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fake ranks send no valid frames, so skip their check.
    monkeypatch.setattr(ProcessGroupExchange, "conclude", lambda *arguments: True)
    with_fake_ranks(64, counted, spec, 64)


def test_counted_bytes_of_topk_are_those_of_its_entries() -> None:
    """10 % of 884 values in one group are 89: 4 bytes and 3 bits each, and 89 + 110 bits."""

    def body() -> int:
        model = wrap(mlp(torch.float32), bucket_cap_mb=None)
        handle = torchcomp.register(model, "ef(topk(0.1))")
        loss_of(model(rows(0, torch.float32))).backward()
        return handle.stats.bytes_sent

    message = 89 * 4 + 34 + 25
    assert on_threads(2, body) == [16 + message + 1] * 2


# Bytes to every other rank: whether a message was damaged, whether a mean is not finite, and
# whether each of the eight parameters was used. All-reduced means need no message.
@pytest.mark.parametrize(
    ("spec", "unused", "expected"),
    [
        ("mean", False, 0),
        ("powersgd(rank=1)", False, 0),
        # Damage, a value that is not finite; and twice whether the last step was taken back.
        ("ef(topk(0.1))", False, 4),
        ("bidirectional(topk(0.1), topk(0.1))", False, 4),
        ("ef(topk(0.1))", True, 4 + 8),
    ],
)
def test_control_messages_are_counted_apart(spec: str, unused: bool, expected: int) -> None:
    def body() -> list[torchcomp.Stats]:
        model = wrap(mlp(torch.float32), find_unused_parameters=unused)
        handle = torchcomp.register(model, spec)
        seen = []
        for step in range(2):
            loss_of(model(rows(step, torch.float32))).backward()
            seen.append(handle.stats)
        return seen

    # The first step also compares the settings: two 8-byte numbers to every other rank.
    for first, second in on_threads(3, body):
        assert first.control_bytes_sent == 2 * (16 + expected)
        assert second.control_bytes_sent == 2 * expected
        assert second.total_control_bytes_sent == 2 * (16 + 2 * expected)


def test_another_thread_reads_the_counters_of_whole_steps_only() -> None:
    def body(exchange: torchcomp.InProcessExchange) -> None:
        tensors = {"w": torch.ones(1000)}
        averager = torchcomp.Averager("mean", exchange, tensors)
        finished = {averager.stats}
        with snapshots(lambda: averager.stats) as seen:
            for _ in range(100):
                averager.average_all(tensors)
                finished.add(averager.stats)
        assert len(seen) > 1
        assert seen <= finished
        for stats in seen:
            assert stats.total_bytes_sent == stats.steps * stats.bytes_sent
            assert stats.total_dense_bytes_sent == stats.steps * stats.dense_bytes_sent

    torchcomp.run_in_process(2, body)


def test_another_thread_reads_the_residual_of_whole_steps_only() -> None:
    def body(exchange: torchcomp.InProcessExchange) -> None:
        tensors = {f"w{i}": torch.ones(300) for i in range(50)}
        groups = [(name,) for name in tensors]
        averager = torchcomp.Averager("ef(topk(0.1))", exchange, tensors, groups)

        def norms() -> tuple[float, ...]:
            return tuple(averager.residual_norms().values())

        finished = {norms()}
        with snapshots(norms) as seen:
            for step in range(20):
                averager.average_all({name: torch.full((300,), step + 1.0) for name in tensors})
                finished.add(norms())
                if step % 5 == 4:
                    averager.use("mean" if step % 10 == 4 else "ef(topk(0.1))")
                    finished.add(norms())
        # A slot is laid out bucket by bucket, with zeros, in its first step.
        residuals = {read for read in seen if any(read)}
        assert residuals
        assert residuals <= finished

    torchcomp.run_in_process(1, body)


def test_as_dict_has_every_counter_and_the_ratios() -> None:
    stats = torchcomp.Stats(2, 2, 10, 20, 310, 4, 6, 40, 50, 620, 8, 12)
    assert stats.as_dict() == {
        "torchcomp/steps": 2,
        "torchcomp/syncs": 2,
        "torchcomp/bytes_sent": 10,
        "torchcomp/bytes_received": 20,
        "torchcomp/dense_bytes_sent": 310,
        "torchcomp/control_bytes_sent": 4,
        "torchcomp/inside_bytes_sent": 6,
        "torchcomp/total_bytes_sent": 40,
        "torchcomp/total_bytes_received": 50,
        "torchcomp/total_dense_bytes_sent": 620,
        "torchcomp/total_control_bytes_sent": 8,
        "torchcomp/total_inside_bytes_sent": 12,
        "torchcomp/traffic_ratio": 31.0,
        "torchcomp/total_traffic_ratio": 15.5,
    }
    assert set(stats.as_dict(prefix="")) >= {"steps", "traffic_ratio"}
    before = torchcomp.Stats(3, *[0] * 11).as_dict("")  # before anything was sent
    assert before["steps"] == 3
    assert not {"traffic_ratio", "total_traffic_ratio"} & set(before)


@pytest.mark.parametrize("nodes", [None, 2])
def test_register_logs_the_method_and_its_bytes_on_rank_0(
    nodes: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torchcomp")
    spec = "ef(topk(0.1))"

    def body() -> tuple[int, torchcomp.Stats]:
        model = wrap(mlp(torch.float32))
        handle = torchcomp.register(model, spec, nodes=nodes)
        loss_of(model(rows(0, torch.float32))).backward()
        return sum(p.numel() for p in model.parameters()), handle.stats

    numel, stats = on_threads(4, body)[0]
    (record,) = [record for record in caplog.records if record.levelno == logging.INFO]
    for value in (spec, numel, stats.bytes_sent, stats.dense_bytes_sent):
        assert (f"{value:,}" if isinstance(value, int) else value) in record.getMessage()
