"""Ranks as processes, one of which gets a fault, and what becomes of all of them."""

import ctypes
import gc
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.exchange.test_private import resources
from tests.faults.clients import CLIENTS, FAULTY_STEP, STEPS, Client, LocalSteps, places
from tests.support.outcomes import same
from tests.support.ranks import PRELOADED

TIMEOUT = 15
"""Seconds until a collective of the group gives up. More than a busy machine needs for a step."""

PAUSE = 3
"""Seconds for which a paused rank is stopped: less than TIMEOUT."""

VICTIM = 1


@dataclass(frozen=True)
class Case:
    """A fault of one rank."""

    client: str  # what the ranks train, a key of CLIENTS
    place: str  # where the rank gets the fault
    fault: str  # what happens there: see _inject

    def __str__(self) -> str:
        return f"{self.client}: {self.fault} at {self.place}".replace(" ", "-")


@dataclass
class Outcome:
    """What became of one rank."""

    type: str = ""  # of what a step raised
    message: str = ""
    seconds: float = 0.0  # from the fault to the end of the step that raised, or of the run
    step: int = 0  # in which the rank ended, or STEPS
    weights: torch.Tensor | None = None  # at the end
    unchanged: bool = True  # whether weights and state are those before the step that raised
    # Descriptors and threads at the end, after close(), above those before registering.
    left: tuple[int, int] = (0, 0)
    code: int | None = None
    trace: str = ""

    @property
    def completed(self) -> bool:
        return (self.type, self.code, self.step) == ("", 0, STEPS)


@dataclass(frozen=True)
class Place:
    """Where a rank runs: here, or on a host of its own."""

    namespace: str  # name of the host's network namespace, or ""
    interface: str  # for gloo
    store: tuple[str, int]  # address and port of the store of the job
    has_store: bool  # whether this rank serves the store, as the first one of a job does


def _exhaust_descriptors() -> None:
    """Let the process open no further file, until :func:`_allow_descriptors`."""
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (used, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


def _allow_descriptors() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _exhaust_memory() -> None:
    """Allocate more memory than the process may have, as a large tensor would."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, hard))
    try:
        torch.empty(2**30, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def _inject(fault: str, folder: Path) -> None:
    if fault.startswith("SIG"):
        # The parent continues a stopped process: when the others have ended, or after PAUSE.
        os.kill(os.getpid(), getattr(signal, fault.removesuffix(" for a while")))
    elif fault.startswith("raise"):
        raise MemoryError("injected")
    elif fault == "exit":
        sys.exit(3)
    elif fault == "out of memory":
        _exhaust_memory()
    elif fault == "no descriptors":
        _exhaust_descriptors()
    elif fault == "network":  # the parent changes it
        _wait_for(folder / "done")


def run(
    case: Case,
    folder: Path,
    timeout: float = TIMEOUT,
    hosts: Sequence[Place] = (),
    network: Callable[[], None] | None = None,
) -> list[Outcome]:
    """Train on several processes with a fault, and return the outcomes of all ranks.

    The timeout is that of the process group, and `network` the fault of this name. Without `hosts`,
    all ranks run here.
    """
    folder.mkdir(exist_ok=True)
    world_size = CLIENTS[case.client][1]
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, __name__])
    # In this process, as in torchrun's: it outlives every rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here = Place("", "lo", ("127.0.0.1", store.port), False)
    processes = [
        context.Process(target=_main, args=(rank, world_size, place, folder, case, timeout))
        for rank, place in enumerate(hosts or [here] * world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 2 * timeout + 60
    try:
        _wait(case, processes, folder, deadline, network)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [_outcome(folder, rank, each.exitcode) for rank, each in enumerate(processes)]


def _wait(
    case: Case,
    processes: list[Any],
    folder: Path,
    deadline: float,
    network: Callable[[], None] | None,
) -> None:
    others = [each for rank, each in enumerate(processes) if rank != VICTIM]
    while any(each.is_alive() for each in processes):
        if time.monotonic() > deadline:
            return
        faulty = (folder / "fault").exists()
        if faulty and network is not None and not (folder / "done").exists():
            network()
            (folder / "done").touch()
        # A stopped process cannot end meanwhile, so its number is still its own.
        if faulty and case.fault.startswith("SIGSTOP") and _is_stopped(processes[VICTIM].pid):
            over = time.monotonic() - float((folder / "fault").read_text()) > PAUSE
            if over if case.fault != "SIGSTOP" else not any(each.is_alive() for each in others):
                os.kill(processes[VICTIM].pid, signal.SIGCONT)
        time.sleep(0.02)


def _is_stopped(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "T"


def _outcome(folder: Path, rank: int, code: int | None) -> Outcome:
    path = folder / f"{rank}.pt"
    outcome = torch.load(path, weights_only=False) if path.exists() else Outcome()
    outcome.code = code
    return outcome


def _main(
    rank: int, world_size: int, place: Place, folder: Path, case: Case, timeout: float
) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    if place.namespace:
        _enter(place.namespace)
    limit, before = timedelta(seconds=timeout), resources()
    store = dist.TCPStore(*place.store, is_master=place.has_store, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    outcome = Outcome()
    # torch gives the groups of a device mesh its own timeout, not that of the default group.
    with mock.patch.object(dist.distributed_c10d, "default_pg_timeout", limit):
        _train(case, folder, rank, world_size, outcome)
    # The model first: a hook of `reach` and an error's traceback are cycles around it.
    gc.collect()
    dist.destroy_process_group()
    del store
    after = resources()
    outcome.left = (after[0] - before[0], after[1] - before[1])
    # Write and rename: a rank that is killed while it writes leaves no result.
    torch.save(outcome, folder / f"{rank}.tmp")
    os.rename(folder / f"{rank}.tmp", folder / f"{rank}.pt")


def _enter(namespace: str) -> None:
    """Move this process to a network namespace."""
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None).setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(f"cannot enter {namespace}")


def _train(case: Case, folder: Path, rank: int, world_size: int, outcome: Outcome) -> None:
    now = [-1]

    def reach(place: str) -> None:
        at = -1 if place in ("register", "connect") else FAULTY_STEP
        if (rank, place, now[0]) == (VICTIM, case.place, at):
            now[0] = STEPS  # once
            (folder / "fault.tmp").write_text(str(time.monotonic()))
            os.rename(folder / "fault.tmp", folder / "fault")
            _inject(case.fault, folder)

    client, state, weights = None, None, None
    with places(reach):
        try:
            build, _, options = CLIENTS[case.client]
            client = build(reach, **options)
            for step in range(STEPS):
                now[0] = max(now[0], step)
                state, weights = client.state(), client.weights()
                if step == FAULTY_STEP and case.place in ("gather", "swap"):
                    reach(case.place)
                    client.call(case.place)
                client.step(step, reach)
                outcome.step = step + 1
        except BaseException as error:
            outcome.type, outcome.message = type(error).__name__, str(error)
            outcome.trace = traceback.format_exc()
    _allow_descriptors()
    fault = folder / "fault"
    outcome.seconds = time.monotonic() - float(fault.read_text()) if fault.exists() else 0.0
    if case.fault == "raise and stay" and rank == VICTIM:
        # It lives on: the others must not need the end of its process.
        for other in set(range(world_size)) - {rank}:
            _wait_for(folder / f"{other}.pt")
    if client is not None:
        outcome.weights = client.weights()
        if outcome.type:
            # A local step counts, also if the average after it does not.
            weights = client.own if isinstance(client, LocalSteps) else weights
            outcome.unchanged = _same_state(client, client.state(), state) and same(
                client.weights(), weights
            )
        client.handle.close()


def _same_state(client: Client, one: Any, other: Any) -> bool:
    if isinstance(client, LocalSteps):
        return same(one["slots"], other["slots"])  # the local step itself counts
    # A step that is discarded has sent its bytes all the same.
    return same({**one, "traffic": None}, {**other, "traffic": None})
