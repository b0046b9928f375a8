"""Runs one function on several ranks: as threads of this process, or as processes over gloo.

The only file of the project that imports ``torch.testing._internal``.
"""

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

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from tests.support.patience import PATIENCE

Body = Callable[..., Any]

PRELOADED = ["tests.support.warm", "hypothesis", "pytest", "tests.support.models", __name__]
"""What takes each rank seconds otherwise."""


def on_threads(world_size: int, body: Body, *args: Any, catch: bool = False) -> list[Any]:
    """``body(*args)`` on `world_size` ranks, each a thread, with an in-memory process group.

    Milliseconds instead of seconds; exchanges run inline, so nothing overlaps. Ranks that hang are
    waited for until pytest's own limit, which shows where every thread is and ends the process:
    a thread cannot be ended, and beside one that was left no later test could be trusted.

    Args:
        world_size: number of ranks.
        body: runs with torch.distributed initialised.
        args: handed to `body`, shared by all ranks.
        catch: return exceptions as results instead of raising the first.

    Returns:
        Each rank's result, in rank order.
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
                # Wakes ranks that wait for this one in a collective.
                ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    try:
        threads = [
            threading.Thread(target=rank_main, args=(rank,), daemon=True)
            for rank in range(world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        # DDP's forward restores what it found, and forwards of several threads find each other's:
        # what stays behind would pass for the model that later tests compile.
        DistributedDataParallel._active_ddp_module = None
    return outcomes if catch else _results(outcomes)


def on_processes(
    world_size: int, body: Body, *args: Any, catch: bool = False, timeout: float = PATIENCE
) -> list[Any]:
    """``body(*args)`` on `world_size` processes over gloo on loopback.

    Args:
        world_size: number of ranks.
        body: a module-level function; its arguments and result are pickled.
        args: handed to `body`.
        catch: return exceptions as results instead of raising the first.
        timeout: seconds after which every process is ended and TimeoutError is raised.

    Returns:
        Each rank's result, in rank order.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Forked from one process that has done what takes each rank seconds.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        processes = [
            context.Process(target=_process_main, args=(rank, world_size, folder, body, args))
            for rank in range(world_size)
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
    """``body(*args)`` as rank 0 of `world_size` ranks that all send what this one sends."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        return body(*args)
    finally:
        dist.destroy_process_group()


def _process_main(rank: int, world_size: int, folder: str, body: Body, args: Any) -> None:
    # A test that takes too long ends the parent at once, which runs no finally: do not outlive it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    # One thread a rank: spinning OpenMP threads of several ranks stall each other on few cores.
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=PATIENCE),
    )
    try:
        outcome = body(*args)
    except Exception as error:
        error.add_note(traceback.format_exc())
        outcome = error
    torch.save(outcome, f"{folder}/{rank}.tmp")
    os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _outcome(folder: Path, rank: int, code: int | None) -> Any:
    path = folder / f"{rank}.pt"
    if not path.exists():
        return RuntimeError(f"rank {rank} ended with exit code {code} and no result")
    return torch.load(path, weights_only=False)


def _results(outcomes: list[Any]) -> list[Any]:
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, BaseException):
            outcome.add_note(f"(raised on rank {rank})")
            raise outcome
    return outcomes
