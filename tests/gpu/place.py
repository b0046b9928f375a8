"""Where the tests of this folder run: on CUDA devices, or in a rehearsal on the CPU.

``TORCHCOMP_REHEARSE=1`` runs the same tests on the CPU, over gloo, with tiny sizes. It shows that
they have no errors of their own, and that the forms for devices compute the right bits. It cannot
show races and waits: for these, a rehearsal has nothing to find.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.gpu import device
from tests.support.patience import PATIENCE
from tests.support.ranks import on_processes
from torchcomp.ddp import executors
from torchcomp.kernels import backend

REHEARSAL = os.environ.get("TORCHCOMP_REHEARSE") == "1"
KIND = "cpu" if REHEARSAL else "cuda"
NCCL = "gloo" if REHEARSAL else "nccl"
ACTIVE = REHEARSAL or torch.cuda.is_available()
GPUS = 2 if REHEARSAL else torch.cuda.device_count()
"""A rehearsal pretends to have two, on which the tests for several GPUs run."""

DEVICE = torch.device(KIND)
WIDTH = 16 if REHEARSAL else 256
"""Width of the layers of small models."""

_PAUSE_CYCLES = 3_000_000  # one or two milliseconds


def on_ranks(world_size: int, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Run ``body(*args)`` on several processes; see :func:`on_processes`."""
    start = "forkserver" if REHEARSAL else "spawn"
    return on_processes(world_size, body, *args, **{"start": start, "timeout": _rest(), **options})


def _rest() -> float:
    """Seconds until ranks must have ended: a hang must show before the runner ends the file."""
    deadline = os.environ.get("TORCHCOMP_DEADLINE")  # of time.monotonic, which processes share
    return PATIENCE if deadline is None else max(1.0, float(deadline) - time.monotonic() - 10)


def gpu(index: int) -> torch.device:
    """Return a GPU; in a rehearsal always the CPU."""
    return DEVICE if REHEARSAL else torch.device("cuda", index)


@contextmanager
def device_forms() -> Iterator[None]:
    """Run the forms for devices. They may not make the host wait."""
    with ExitStack() as stack:
        if REHEARSAL:
            stack.enter_context(mock.patch("torchcomp.engine.host.can_read", return_value=False))
            stack.enter_context(backend.plain_torch("cpu"))
        stack.enter_context(device.no_waits(KIND))
        yield


def pause() -> None:
    """Let the current stream do nothing for a while; in a rehearsal the thread."""
    if REHEARSAL:
        time.sleep(0.0005)
    else:
        torch.cuda._sleep(_PAUSE_CYCLES)


@contextmanager
def delayed(stream: str, module: nn.Module) -> Iterator[None]:
    """Let one stream lag behind the other, so that a missing order between them shows.

    Args:
        stream: "backward", the stream of the backward pass; "exchange", the stream on which buckets
            are averaged; or "none".
        module: the model in training.
    """
    with ExitStack() as stack:
        if stream == "backward":
            for parameter in module.parameters():
                hook = parameter.register_hook(lambda gradient: pause())
                stack.callback(hook.remove)
        if stream == "exchange":
            for executor in (executors.StreamExecutor, executors.ThreadExecutor):
                late = _after_a_pause(executor.submit)
                stack.enter_context(mock.patch.object(executor, "submit", late))
        yield


def _after_a_pause(submit: Callable[..., None]) -> Callable[..., None]:
    def late(self: executors.Executor, job: executors.Job, *, always: bool = False) -> None:
        submit(self, lambda: (pause(), job()), always=always)

    return late
