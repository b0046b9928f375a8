"""The handle: wrong calls, statistics, closing, and what it does beside the backward pass."""

import gc
import io
import logging
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.ddp.runs import TOPK, Run
from tests.exchange.test_private import resources
from tests.support.cases import soak
from tests.support.commands import run as run_command
from tests.support.models import loss_of, mlp, rows
from tests.support.outcomes import assert_refused, raised_by
from tests.support.patience import PATIENCE
from tests.support.ranks import on_processes, on_threads
from torchcomp import RankMismatchError, SpecError, UnsupportedModelError
from torchcomp.compressors import TopK
from torchcomp.ddp.executors import StreamExecutor
from torchcomp.engine import host
from torchcomp.engine.bucket import Bucket
from torchcomp.exchange import ProcessGroupExchange

# --- Wrong calls ----------------------------------------------------------------------------------


def bad_swaps() -> None:
    """Swaps that raise on all ranks, and change nothing."""
    run, odd = Run(), dist.get_rank() == 1
    for spec, error, match in [
        ("meen", SpecError, "'meen'.* 'mean'"),
        ("every(4)", SpecError, r"schedule.* torchcomp\.LocalSGD\("),
        ("mean" if odd else "topk(0.2)", RankMismatchError, "mean on rank 1"),
        ("topq(0.1)" if odd else "topk(0.1)", RankMismatchError, "'topq'"),
    ]:
        with pytest.raises(error, match=match):
            run.handle.swap(spec)
        assert str(run.handle.method) == TOPK
    with pytest.raises(RuntimeError, match="manager"):
        run.handle.leave()
    assert not run.handle.left
    run.train(0)


def test_a_swap_that_raises_does_so_on_every_rank_and_changes_nothing() -> None:
    on_threads(2, bad_swaps)


def test_calls_during_a_backward_pass_raise() -> None:
    def body() -> dict[str, Exception]:
        run, errors = Run().train(0, 1), {}
        state = run.state

        def call(gradient: Tensor) -> None:
            errors["swap"] = raised_by(lambda: run.handle.swap("mean"))
            errors["state_dict"] = raised_by(run.handle.state_dict)
            errors["load_state_dict"] = raised_by(lambda: run.handle.load_state_dict(state))

        run.model.module[0].weight.register_hook(call)
        run.train(2)
        run.handle.state_dict()
        return errors

    for errors in on_threads(2, body):
        assert set(errors) == {"swap", "state_dict", "load_state_dict"}
        for call, error in errors.items():
            assert type(error) is RuntimeError
            assert re.match(rf"{call} .*backward", str(error)), error


def test_calls_after_close_raise_with_advice() -> None:
    def body() -> list[tuple[type[Exception], str, Exception]]:
        run = Run()
        with run.handle:
            run.backward(0)
        run.handle.close()
        assert run.handle.stats.steps == run.state["step"] == 1
        model, handle = run.model, run.handle
        name = re.escape(f"torchcomp.register('{TOPK}')")
        return [
            (RuntimeError, "swap ", raised_by(lambda: handle.swap("mean"))),
            (RuntimeError, "load_state_dict ", raised_by(lambda: handle.load_state_dict({}))),
            (UnsupportedModelError, name, raised_by(lambda: torchcomp.register(model, TOPK))),
            (RuntimeError, "this handle ", raised_by(lambda: run.backward(1))),
        ]

    for errors in on_threads(2, body):
        for kind, start, error in errors:
            assert type(error) is kind, repr(error)
            message = rf"{start}.*closed.* DistributedDataParallel.* handle\.swap\('mean'\)"
            assert re.match(message, str(error)), error


@pytest.mark.parametrize("name", ["handle", "model"])
def test_pickling_what_register_has_changed_raises_with_advice(name: str) -> None:
    def body() -> None:
        torch.save(getattr(Run(scaler=torch.amp.GradScaler("cpu")), name), io.BytesIO())

    match = r"handle\.state_dict\(\).* model\.module\.state_dict\(\)"
    assert_refused(2, body, TypeError, match=match)


def test_an_error_in_an_exchange_is_raised_unchanged() -> None:
    """DDP would report it as "Unable to cast <message> to Tensor"."""

    def body() -> None:
        run = Run()
        with mock.patch.object(TopK, "encode_sum", side_effect=ValueError("no luck")):
            run.backward(0)

    assert_refused(1, body, ValueError, match="^no luck$")


# --- Statistics -----------------------------------------------------------------------------------


# Bytes to every other rank: whether a message was damaged, whether a mean is not finite, and
# whether each of the eight parameters was used. All-reduced means need no message.
@pytest.mark.parametrize(
    ("spec", "unused", "expected"),
    [
        ("mean", False, 0),
        ("powersgd(rank=1)", False, 0),
        # Damage, a value that is not finite; and twice whether the last step was taken back.
        (TOPK, False, 4),
        ("bidirectional(topk(0.1), topk(0.1))", False, 4),
        (TOPK, True, 4 + 8),
    ],
)
def test_control_messages_are_counted_apart(spec: str, unused: bool, expected: int) -> None:
    def body() -> list[torchcomp.Stats]:
        run = Run(spec, dtype=torch.float32, ddp={"find_unused_parameters": unused})
        return [(run.backward(step), run.handle.stats)[1] for step in range(2)]

    # The first step also compares the settings: two 8-byte numbers to every other rank.
    for first, second in on_threads(3, body):
        assert first.control_bytes_sent == 2 * (16 + expected)
        assert second.control_bytes_sent == 2 * expected
        assert second.total_control_bytes_sent == 2 * (16 + 2 * expected)


def test_as_dict_has_every_counter_and_the_ratios() -> None:
    stats = torchcomp.Stats(2, 2, 10, 20, 310, 4, 6, 40, 50, 620, 8, 12)
    scalars = stats.as_dict()
    assert scalars.pop("torchcomp/traffic_ratio") == 31.0
    assert scalars.pop("torchcomp/total_traffic_ratio") == 15.5
    assert scalars == {f"torchcomp/{name}": value for name, value in vars(stats).items()}
    assert set(stats.as_dict(prefix="")) >= {"steps", "traffic_ratio"}
    before = torchcomp.Stats(3, *[0] * 11).as_dict("")  # before anything was sent
    assert before["steps"] == 3
    assert not {"traffic_ratio", "total_traffic_ratio"} & set(before)


@pytest.mark.parametrize("nodes", [None, 2])
def test_register_logs_the_method_and_its_bytes_on_rank_0(
    nodes: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torchcomp")

    def body() -> tuple[int, torchcomp.Stats]:
        run = Run(dtype=torch.float32, nodes=nodes).train(0)
        return sum(p.numel() for p in run.model.parameters()), run.handle.stats

    numel, stats = on_threads(4, body)[0]
    (record,) = [record for record in caplog.records if record.name == "torchcomp.ddp.register"]
    for value in (TOPK, f"{numel:,}", f"{stats.bytes_sent:,}", f"{stats.dense_bytes_sent:,}"):
        assert value in record.getMessage()


# --- Overlap over gloo ----------------------------------------------------------------------------


def overlaps(spec: str, collective: str) -> bool:
    """Whether an exchange ends while a hook delays the last gradient; the rest is waited for."""
    run, exchange = Run(spec), getattr(ProcessGroupExchange, collective)
    for step in range(2):
        run.backward(step)
    exchanged, in_time, before = threading.Event(), [], run.handle.seconds_waited

    def noted(self: ProcessGroupExchange, values: Tensor, **options: Any) -> Any:
        if in_time:
            time.sleep(0.3)
        result = exchange(self, values, **options)
        exchanged.set()
        return result

    def hold_back(gradient: Tensor) -> None:
        in_time.append(exchanged.wait(timeout=PATIENCE))

    run.model.module[0].weight.register_hook(hold_back)
    with mock.patch.object(ProcessGroupExchange, collective, noted):
        run.backward(2)
    run.handle.close()
    return in_time == [True] and 0 < before < before + 0.15 < run.handle.seconds_waited


def test_exchange_overlaps_and_the_rest_of_it_is_waited_for() -> None:
    for case in ((TOPK, "all_gather_rows"), ("mean", "all_reduce")):
        assert on_processes(2, overlaps, *case) == [True, True]


# --- Closing, threads and memory ------------------------------------------------------------------


def registered_and_closed(options: dict[str, Any], times: int) -> Any:
    """Descriptors and threads after one closed handle, and after more of them; all models live."""
    kept = []

    def once() -> None:
        model = DistributedDataParallel(nn.Linear(4, 2))
        handle = torchcomp.register(model, "ef(topk(0.5))", **options)
        model(torch.ones(1, 4)).sum().backward()
        handle.close()
        kept.append((model, handle))

    once()
    before = resources()
    for _ in range(times):
        once()
    dist.barrier()
    return before, resources()


@pytest.mark.parametrize("times", [5, *soak([500])])
@pytest.mark.parametrize("options", [{}, {"nodes": 2}])
def test_a_closed_handle_has_no_descriptors_or_threads(options: Any, times: int) -> None:
    for before, after in on_processes(2, registered_and_closed, options, times):
        assert after <= before


def test_the_side_stream_has_a_high_priority() -> None:
    with mock.patch.object(torch.cuda, "Stream") as stream:
        StreamExecutor(torch.device("cuda", 1))
    stream.assert_called_once_with(torch.device("cuda", 1), priority=-1)


SCRIPT = """
import os, threading
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import torchcomp
from torchcomp.exchange import ProcessGroupExchange

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = DistributedDataParallel(torch.nn.Linear(2, 1))
handle = torchcomp.register(model, "mean")
started = threading.Event()

def stuck(*arguments, **options):
    started.set()
    threading.Event().wait()

ProcessGroupExchange.all_reduce = stuck
threading.Thread(target=lambda: model(torch.ones(1, 2)).sum().backward(), daemon=True).start()
assert started.wait(60)
print("the script ends")
"""


def test_a_process_ends_behind_a_stuck_collective() -> None:
    # The command fails if the process is still there after the tests' patience.
    assert "the script ends" in run_command([sys.executable, "-c", SCRIPT]).stdout


def buckets_in_memory() -> list[Bucket]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is Bucket]


@pytest.mark.parametrize(("spec", "unused"), [("mean", False), (TOPK, True)])
def test_no_bucket_of_ddp_is_kept_after_a_backward_pass(spec: str, unused: bool) -> None:
    def body() -> int:
        module = mlp()
        if unused:
            module.register_parameter("unused", nn.Parameter(torch.ones(5)))
        # Those of earlier tests, which their threads can still let go.
        before = list(map(weakref.ref, buckets_in_memory()))
        run = Run(spec, module, ddp={"find_unused_parameters": unused})
        for step in range(2):
            run.backward(step)
        assert run.handle.stats.steps == 2
        known = [each() for each in before]
        return sum(all(each is not old for old in known) for each in buckets_in_memory())

    # One rank: the buckets of others that still run would be counted.
    assert on_threads(1, body) == [0]


# --- The loss scale on a device -------------------------------------------------------------------


def scales(update_between: bool) -> tuple[list[float], list[str], int]:
    """Train with a scale that is not on the CPU. Return scales, copies, and other reads of it."""
    calls: list[str] = []

    def copy_from(scale: Tensor) -> Callable[[], Tensor]:
        if scale.dim():
            return lambda: scale  # the concluding message
        calls.append("copy")
        copy = scale.clone()
        return lambda: calls.append("read") or copy

    scaler, found = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1), []
    run = Run(scaler=scaler, lr=0.01)
    with (
        mock.patch.object(host, "can_read", lambda x: x.dim() > 0),
        mock.patch("torchcomp.ddp.loop.host.copy_from", copy_from),
        mock.patch.object(scaler, "get_scale", wraps=scaler.get_scale) as get_scale,
    ):
        for step in range(3):
            run.optimizer.zero_grad()
            loss = loss_of(run.model(rows(step)))
            if update_between and step:
                scaler.update(float(1000 + step))
            scaler.scale(loss).backward()
            scaler.step(run.optimizer)
            found.append(run.state["scale"])
            scaler.update()
        # A forward pass that follows no update has nothing new to copy.
        for _ in range(2):
            run.model(rows(3))
    return found, calls, get_scale.call_count


def test_the_scale_is_copied_in_the_forward_pass_unless_it_is_set_after_that() -> None:
    found, calls, waited = on_threads(1, scales, False)[0]
    # Before the first loss, the scaler has no scale that could be copied.
    assert (found, waited) == ([64.0, 128.0, 256.0], 1)
    assert calls == ["copy", "read"] * 2 + ["copy"]
    found, _, waited = on_threads(1, scales, True)[0]
    assert (found, waited) == ([64.0, 1001.0, 1002.0], 3)
