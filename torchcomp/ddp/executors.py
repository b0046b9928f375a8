"""Executors: where the exchange of a bucket runs while the backward pass goes on."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torchcomp.exchange import Exchange, ProcessGroupExchange

Job = Callable[[], None]


class Executor:
    """Runs jobs one after another, in the order of submission; this one at once.

    Jobs handle their own errors.
    """

    def submit(self, job: Job) -> None:
        """Run `job` after all earlier ones."""
        job()

    def join(self) -> None:
        """Return once the host has run every submitted job."""

    def close(self) -> None:
        """Finish what was submitted and release threads; harmless when repeated."""


class StreamExecutor(Executor):
    """Enqueues each job on a side stream of one accelerator, in the calling thread.

    Collectives of NCCL run when the stream reaches them, so the host returns to the backward pass
    at once and its kernels run beside the exchange.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, job: Job) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            job()

    def close(self) -> None:
        self._stream.synchronize()


class ThreadExecutor(Executor):
    """Runs jobs in one background thread: the only safe way to overlap collectives of gloo.

    gloo blocks the calling thread, and a collective issued from a future's callback can pair with
    another one on another rank; one thread that works a queue off does neither.
    """

    def __init__(self) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="torchcomp-exchange", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def join(self) -> None:
        self._jobs.join()

    def close(self) -> None:
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            # A local that outlives its job would keep the job's tensors alive until the next one.
            del job
            self._jobs.task_done()
        self._jobs.task_done()


def transport(group: dist.ProcessGroup | None, device: torch.device) -> tuple[Exchange, Executor]:
    """An exchange among the ranks of `group`, and what runs it; all of the ranks call this."""
    if device.type == "cuda":
        return ProcessGroupExchange(group, device), StreamExecutor(device)
    # Not get_backend, because a group that was made without naming a backend has several.
    if "cpu:gloo" not in dist.get_backend_config(group):
        return ProcessGroupExchange(group, device), Executor()
    # A group of its own, because DDP and the user issue collectives from another thread.
    ranks = dist.get_process_group_ranks(group)
    users: Any = group or dist.group.WORLD
    # Without it, new_group takes half an hour instead of what the user chose.
    timeout = users._get_backend(device).options._timeout
    private = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
    return ProcessGroupExchange(private, device), ThreadExecutor()


def after_backward(callback: Callable[[], None]) -> None:
    """Call this when the backward pass in progress ends, behind the callbacks queued before."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)
