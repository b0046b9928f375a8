"""Executors: run the exchange of buckets in parallel with the backward pass."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torchcomp.exchange import Exchange, PrivateExchange, ProcessGroupExchange, new_name
from torchcomp.specs.errors import ON_ALL_RANKS

Job = Callable[[], object]
Leave = Callable[[BaseException], None]

# How long a process that ends waits for jobs: another rank may never join their collectives.
AT_EXIT_SECONDS = 2.0


class Executor:
    """Runs jobs in the order of submission, until one raises; this base class without overlap.

    `leave` is called with an error that other ranks, which would wait for this one, may not have.
    """

    def __init__(self, leave: Leave | None = None) -> None:
        self.failure: BaseException | None = None  # of a job; the owner reads and resets it
        self._leave = leave

    def submit(self, job: Job, *, always: bool = False) -> None:
        """Run `job` after all earlier ones; if one of them failed, only with `always`."""
        self._run(job, always)

    def join(self) -> None:
        """Wait until the host has run every submitted job."""

    def close(self, timeout: float | None = None) -> None:
        """Finish the submitted jobs, or wait `timeout` seconds for them; release threads."""

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        if self._leave is not None and not isinstance(error, ON_ALL_RANKS):
            self._leave(error)

    def _run(self, job: Job, always: bool) -> None:
        if self.failure is None or always:
            try:
                job()
            except BaseException as error:
                # Kept for the owner, because DDP reports an error of a future as another one.
                # SystemExit as well: it would end the thread, and the backward pass would wait.
                self.fail(error)


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream of high priority: otherwise, the many small kernels would end late."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class StreamExecutor(Executor):
    """Enqueues each job on a side stream of one CUDA device, from the calling thread."""

    def __init__(self, device: torch.device, leave: Leave | None = None) -> None:
        super().__init__(leave)
        self._stream = side_stream(device)
        self._caller: torch.cuda.Stream | None = None

    def submit(self, job: Job, *, always: bool = False) -> None:
        # The job reads gradients that this stream computes, maybe not on the current device.
        self._caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(self._caller)
        with torch.cuda.stream(self._stream):
            self._run(job, always)

    def close(self, timeout: float | None = None) -> None:
        # The caller's stream reuses memory that the jobs read. The host does not wait: it would
        # hang behind a collective that another rank never joins.
        if self._caller is not None:
            self._caller.wait_stream(self._stream)


class ThreadExecutor(Executor):
    """Runs jobs in one worker thread, for gloo, whose collectives block the caller."""

    def __init__(self, leave: Leave | None = None) -> None:
        super().__init__(leave)
        self._jobs: queue.Queue[tuple[Job, bool] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="torchcomp-exchange", daemon=True)
        self._thread.start()

    def submit(self, job: Job, *, always: bool = False) -> None:
        self._jobs.put((job, always))

    def join(self) -> None:
        self._jobs.join()

    def close(self, timeout: float | None = None) -> None:
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(timeout)

    def _work(self) -> None:
        while (submitted := self._jobs.get()) is not None:
            self._run(*submitted)
            del submitted  # or the job's tensors live until the next job
            self._jobs.task_done()
        self._jobs.task_done()


def transport(group: dist.ProcessGroup | None, device: torch.device) -> tuple[Exchange, Executor]:
    """Return an exchange among the ranks of `group`, which all call this, and its executor."""
    exchange = users = ProcessGroupExchange(group, device)
    if device.type != "cuda" and users.backend == "gloo":
        # A private group, because DDP and the user issue collectives from another thread.
        exchange = PrivateExchange(new_name(users), users.global_ranks, users)
    return exchange, executor_for(users, exchange.leave)


def executor_for(exchange: ProcessGroupExchange, leave: Leave) -> Executor:
    """Return an executor for exchanges like that over the user's group."""
    if exchange.device.type == "cuda":
        return StreamExecutor(exchange.device, leave)
    return ThreadExecutor(leave) if exchange.backend == "gloo" else Executor(leave)


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the current backward pass, as DDP does its final one."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)
