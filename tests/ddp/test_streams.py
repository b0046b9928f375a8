"""What DDP's handle does for CUDA, with stand-ins for streams: order, memory, scale and exit."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import torchcomp
from tests.support.commands import run
from tests.support.models import loss_of, mlp, rows, wrap
from tests.support.ranks import on_threads
from torchcomp.ddp.executors import StreamExecutor, ThreadExecutor
from torchcomp.engine import host
from torchcomp.engine.bucket import Bucket

# --- Executors ------------------------------------------------------------------------------------


def test_the_side_stream_has_a_high_priority_and_is_closed_without_a_wait_of_the_host() -> None:
    main = mock.Mock()
    with (
        mock.patch.object(torch.cuda, "Stream") as stream,
        mock.patch.object(torch.cuda, "current_stream", return_value=main),
        mock.patch.object(torch.cuda, "stream"),
    ):
        executor = StreamExecutor(torch.device("cuda", 1))
        executor.submit(lambda: None)
    executor.close()
    ((device,), options), side = stream.call_args, stream.return_value
    assert device == torch.device("cuda", 1)
    assert options["priority"] < 0
    # The device waits: later work can reuse the memory that the jobs still read.
    main.wait_stream.assert_called_once_with(side)
    side.synchronize.assert_not_called()


def test_closing_does_not_wait_for_a_stuck_collective() -> None:
    executor, started, stuck, ended = ThreadExecutor(), *(threading.Event() for _ in range(3))

    def job() -> None:
        started.set()
        stuck.wait()
        ended.set()

    executor.submit(job)
    started.wait()
    executor.close(timeout=0.01)
    assert not ended.is_set()
    stuck.set()
    executor.close()
    assert ended.is_set()


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
    # `run` fails if the process is still there after the tests' patience.
    assert "the script ends" in run([sys.executable, "-c", SCRIPT]).stdout


# --- Memory ---------------------------------------------------------------------------------------


def buckets_in_memory() -> list[Bucket]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is Bucket]


@pytest.mark.parametrize(
    ("spec", "find_unused_parameters"), [("mean", False), ("ef(topk(0.1))", True)]
)
def test_no_bucket_of_ddp_is_kept_after_a_backward_pass(
    spec: str, find_unused_parameters: bool
) -> None:
    def body() -> int:
        module = mlp()
        if find_unused_parameters:
            module.register_parameter("unused", nn.Parameter(torch.ones(5)))
        model = wrap(module, find_unused_parameters=find_unused_parameters)
        # Those of earlier tests, which their threads can still let go.
        before = list(map(weakref.ref, buckets_in_memory()))
        handle = torchcomp.register(model, spec)
        for step in range(2):
            loss_of(model(rows(step))).backward()
        assert handle.stats.steps == 2
        known = [each() for each in before]
        return sum(all(each is not old for old in known) for each in buckets_in_memory())

    # One rank: the buckets of others that still run would be counted.
    assert on_threads(1, body) == [0]


# --- The loss scale -------------------------------------------------------------------------------


class Loop:
    """A training loop with a scaler, whose scale appears to be on a device."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
        self.model = wrap(mlp())
        self.handle = torchcomp.register(self.model, "ef(topk(0.1))", scaler=self.scaler)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def forward(self, step: int) -> Tensor:
        self.optimizer.zero_grad()
        return loss_of(self.model(rows(step)))

    def backward(self, loss: Tensor) -> float:
        """Return the scale that the residual follows."""
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        scale: float = self.handle.state_dict()["scale"]
        return scale


def scales(update_between: bool) -> tuple[list[float], list[str], int]:
    """Train with a scale that is not on the CPU. Return scales, copies, and other reads of it."""
    calls: list[str] = []

    def copy_from(scale: Tensor) -> Callable[[], Tensor]:
        if scale.dim():
            return lambda: scale  # the concluding message
        calls.append("copy")
        copy = scale.clone()
        return lambda: calls.append("read") or copy

    loop, found = Loop(), []
    with (
        # The scale only: frames on the CPU are read as usual.
        mock.patch.object(host, "can_read", lambda x: x.dim() > 0),
        mock.patch("torchcomp.ddp.loop.host.copy_from", copy_from),
        mock.patch.object(loop.scaler, "get_scale", wraps=loop.scaler.get_scale) as get_scale,
    ):
        for step in range(3):
            loss = loop.forward(step)
            if update_between and step:
                loop.scaler.update(float(1000 + step))
            found.append(loop.backward(loss))
            loop.scaler.update()
        # A forward pass that follows no update has nothing new to copy.
        loop.forward(3)
        loop.forward(3)
    return found, calls, get_scale.call_count


def test_the_scale_is_copied_in_the_forward_pass_and_not_waited_for_in_the_backward_pass() -> None:
    found, calls, waited = on_threads(1, scales, False)[0]
    assert found == [64.0, 128.0, 256.0]
    # Before the first loss, the scaler has no scale that could be copied.
    assert waited == 1
    assert calls == ["copy", "read"] * 2 + ["copy"]


def test_a_scale_that_is_set_between_the_passes_is_the_one_that_counts() -> None:
    found, _, waited = on_threads(1, scales, True)[0]
    assert found == [64.0, 1001.0, 1002.0]
    assert waited == 3
