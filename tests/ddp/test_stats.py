"""Statistics: counted bytes equal the plan's, and norms are those of the memory."""

import math

import pytest
import torch

import torchcomp
from tests.support.models import (
    METHODS,
    Branches,
    convolutions,
    images,
    loss_of,
    mlp,
    rows,
    seeded,
    wrap,
)
from tests.support.ranks import on_threads, with_fake_ranks

STEPS = 3


def counted(spec: str, world_size: int) -> None:
    """Compare a run's counters with the plan made from the DDP model beforehand."""
    model = wrap(mlp(torch.float32))
    plan = torchcomp.explain(spec, model=model, world_size=world_size)
    handle = torchcomp.register(model, spec)
    assert handle.stats == torchcomp.Stats(0, 0, 0, 0, 0, 0, 0, 0)
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


@pytest.mark.parametrize("spec", METHODS)
def test_counted_bytes_equal_the_plan(spec: str) -> None:
    for world_size in (2, 3):
        on_threads(world_size, counted, spec, world_size)


@pytest.mark.parametrize("spec", METHODS)
def test_counted_bytes_equal_the_plan_on_64_ranks(spec: str) -> None:
    with_fake_ranks(64, counted, spec, 64)


def test_counted_bytes_of_topk_are_those_of_its_entries() -> None:
    """10 % of 884 values in one group, each 4 bytes and an index of 2, to one other rank."""

    def body() -> int:
        model = wrap(mlp(torch.float32), bucket_cap_mb=None)
        handle = torchcomp.register(model, "ef(topk(0.1))")
        loss_of(model(rows(0, torch.float32))).backward()
        return handle.stats.bytes_sent

    elements = 3 * (16 * 16 + 16) + 16 * 4 + 4
    assert on_threads(2, body) == [math.ceil(0.1 * elements) * 6] * 2


def test_no_sync_sends_nothing() -> None:
    def body() -> None:
        model = wrap(mlp())
        handle = torchcomp.register(model, "ef(topk(0.1))")
        with model.no_sync():
            loss_of(model(rows(0))).backward()
        assert handle.stats.steps == handle.stats.total_bytes_sent == 0
        loss_of(model(rows(1))).backward()
        assert handle.stats.steps == 1

    on_threads(2, body)


def test_error_norms_are_those_of_the_memory_by_parameter() -> None:
    def body() -> None:
        model = wrap(convolutions())
        handle = torchcomp.register(model, "ef(topk(0.1))")
        for step in range(STEPS):
            loss_of(model(images(step))).backward()
        error = handle.state_dict()["error"]
        norms = handle.stats.error_norms
        assert set(norms) == set(error) == {name for name, _ in model.module.named_parameters()}
        for name, tensor in error.items():
            assert norms[name] == pytest.approx(float(tensor.norm()), rel=1e-12)
        assert handle.stats.error_norm == pytest.approx(math.hypot(*norms.values()), rel=1e-12)
        assert handle.stats.error_norm > 0

    on_threads(2, body)


def test_a_method_without_memory_reports_no_error_norm() -> None:
    def body() -> None:
        model = wrap(seeded(Branches().double()), find_unused_parameters=True)
        handle = torchcomp.register(model, "topk(0.1)")
        loss_of(model(rows(0), ("left",))).backward()
        assert handle.stats.error_norm == 0.0
        assert handle.stats.error_norms == {}

    on_threads(2, body)
