"""Run a function on several ranks: as threads of this process, or as processes over gloo."""

import ctypes
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from tests.support.patience import PATIENCE

Body = Callable[..., Any]

# Modules that the fork server imports once. In every rank, they would take seconds.
PRELOADED = ["tests.support.warm", "hypothesis", "pytest", "tests.support.models", __name__]


def on_threads(world_size: int, body: Body, *args: Any, catch: bool = False) -> list[Any]:
    """Run ``body(*args)`` on threads with an in-memory process group; return the results by rank.

    With `catch`, exceptions as well. There is no timeout: a thread cannot be killed.
    """
    outcomes: list[Any] = [None] * world_size
    store = dist.HashStore()

    def rank_main(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            outcomes[rank] = body(*args)
        except BaseException as error:
            outcomes[rank] = error
            if not catch:
                # Wake the ranks that wait for this one in a collective.
                ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    try:
        run = threading.Thread
        threads = [run(target=rank_main, args=(r,), daemon=True) for r in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        # DDP's forward sets and restores this global. The forwards of several threads restore each
        # other's models. A leftover model would be mistaken for the one that later tests compile.
        DistributedDataParallel._active_ddp_module = None
    return outcomes if catch else _results(outcomes)


def on_processes(
    world_size: int,
    body: Body,
    *args: Any,
    catch: bool = False,
    timeout: float = PATIENCE,
    backend: str = "gloo",
    start: str = "forkserver",
) -> list[Any]:
    """As :func:`on_threads`, on processes over gloo, which are killed after `timeout` seconds.

    The `start` "spawn" is slow, but CUDA does not work after a fork of what looked for a device.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Fork from one process that has already imported all modules, which takes seconds.
        context = mp.get_context(start)
        context.set_forkserver_preload(PRELOADED)
        each = (world_size, folder, backend, body, args)
        processes = [
            context.Process(target=_process_main, args=(rank, *each)) for rank in range(world_size)
        ]
        deadline = time.monotonic() + timeout
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            if any(process.is_alive() for process in processes):
                raise TimeoutError(f"a rank is still running after {timeout} seconds")
        finally:
            for process in processes:
                process.kill()
                process.join()
        codes = [process.exitcode for process in processes]
        outcomes = [_outcome(Path(folder), rank, code) for rank, code in enumerate(codes)]
    return outcomes if catch else _results(outcomes)


def with_fake_ranks(world_size: int, body: Body, *args: Any) -> Any:
    """Run ``body(*args)`` as rank 0 of a fake group, whose other ranks send what this one sends."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        # The fake all-to-all of torch 2.6 leaves its output uninitialized.
        with mock.patch.object(dist, "all_to_all_single", _echo):
            return body(*args)
    finally:
        dist.destroy_process_group()


def _echo(received: Tensor, sent: Tensor, *args: Any, **kwargs: Any) -> None:
    received.copy_(sent)


def _process_main(
    rank: int, world_size: int, folder: str, backend: str, body: Body, args: Any
) -> None:
    # Die with the parent. pytest's timeout ends it without running the `finally` that kills ranks.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    # One thread per rank: the spinning OpenMP threads of several ranks stall each other.
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=PATIENCE),
    )
    try:
        outcome = body(*args)
    except Exception as error:
        _note(error, traceback.format_exc())
        outcome = error
    # Write and rename: a rank that is killed while it writes leaves no result.
    torch.save(outcome, f"{folder}/{rank}.tmp")
    os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _outcome(folder: Path, rank: int, code: int | None) -> Any:
    path = folder / f"{rank}.pt"
    if not path.exists():
        return RuntimeError(f"rank {rank} ended with exit code {code} and no result")
    return torch.load(path, weights_only=False)


def _note(error: BaseException, note: str) -> None:
    """As Python 3.11's ``add_note``. Python 3.10 keeps the note, but does not print it."""
    error.__notes__ = [*getattr(error, "__notes__", []), note]


def _results(outcomes: list[Any]) -> list[Any]:
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, BaseException):
            _note(outcome, f"(raised on rank {rank})")
            raise outcome
    return outcomes
