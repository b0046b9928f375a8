"""Labels in a trace of torch.profiler."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

import torchcomp
from tests.support.models import loss_of, mlp, rows, wrap
from tests.support.ranks import on_processes

LABELS = ("average", "encode", "decode")


def labels_of(profiler: profile) -> set[str]:
    prefix = "torchcomp::"
    return {e.name.removeprefix(prefix) for e in profiler.events() if e.name.startswith(prefix)}


def average_two_buckets(exchange: Any, method: str) -> set[str]:
    tensors = {name: torch.randn(300) for name in "ab"}
    averager = torchcomp.Averager(method, exchange, tensors, [("a",), ("b",)])
    averager.average_all(tensors)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        averager.average_all(tensors)
    return labels_of(profiler)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("mean", {*LABELS, "all_reduce"}),
        ('ef(topk(0.1), exchange="allgather")', {*LABELS, "all_gather"}),
        ('ef(topk(0.1), exchange="sharded")', {*LABELS, "all_to_all", "encode downlink"}),
        ("powersgd(rank=1)", {"average", "all_reduce"}),
    ],
)
def test_labels_name_the_parts_of_a_step_and_the_bucket(method: str, expected: set[str]) -> None:
    (labels,) = torchcomp.run_in_process(1, lambda e: average_two_buckets(e, method))
    assert {f"{name} bucket {number}" for name in expected for number in (0, 1)} <= labels
    assert "finish" in labels
    # Control messages of `finish` belong to no bucket.
    assert not any("finish bucket" in name for name in labels)


def labels_by_thread() -> tuple[set[str], set[str]]:
    """Return the labels of the main thread and of all others, of one DDP step."""
    model = wrap(mlp(torch.float32))
    handle = torchcomp.register(model, "ef(topk(0.1))")
    for step in range(2):
        loss_of(model(rows(step, torch.float32))).backward()
    threads = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=threads) as profiler:
        loss_of(model(rows(2, torch.float32))).backward()
    handle.close()
    found = [e for e in profiler.events() if e.name.startswith("torchcomp::")]
    (main,) = {e.thread for e in found if e.name == "torchcomp::wait"}
    return {e.name for e in found if e.thread == main}, {e.name for e in found if e.thread != main}


def test_a_trace_of_all_threads_shows_the_exchange_of_every_bucket() -> None:
    try:
        _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        pytest.skip(f"torch {torch.__version__} traces one thread only")
    for main, others in on_processes(2, labels_by_thread):
        assert main == {"torchcomp::wait"}
        assert {"torchcomp::average bucket 0", "torchcomp::encode bucket 1"} <= others
