"""Start one worker per host, yield the lines that rank 0 reports, and end all workers."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from benchmarks.net.job import Job

_ROOT = Path(__file__).parents[2]
# One thread per rank. Threads that spin while idle would take a core away from another rank.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
# Lines of a failed worker's output that an error shows.
_TAIL = 15


class LaunchError(RuntimeError):
    """A worker failed, or reported nothing until the timeout."""


def results(job: Job, prefixes: list[list[str]]) -> Iterator[dict[str, Any]]:
    """Run `job` with one worker per command prefix; yield rank 0's results as they come.

    Raises:
        LaunchError: If a worker fails, with the last lines of the first one that did.
    """
    worker = [sys.executable, "-m", "benchmarks.net.worker"]
    commands = [[*prefix, *worker, str(r), job.to_json()] for r, prefix in enumerate(prefixes)]
    yield from lines_of(commands, job.interface, job.timeout)


def free_port() -> int:
    """Return a port of the loopback that no program uses."""
    # The loopback is shared with other programs. In a namespace, a fixed port is free.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def lines_of(commands: list[list[str]], interface: str, timeout: float) -> Iterator[dict[str, Any]]:
    """Run one command per rank; yield the lines of JSON that rank 0 prints, as they come.

    Args:
        commands: One command per rank.
        interface: The network device for gloo.
        timeout: Seconds without a line after which all workers are ended.

    Raises:
        LaunchError: If a worker fails, with the last lines of the first one that did.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _workers(commands, interface, folder) as workers, (folder / "out0").open() as lines:
            yield from _follow(workers, lines, folder, timeout)


@contextmanager
def _workers(
    commands: list[list[str]], interface: str, folder: Path
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank, command in enumerate(commands):
            with _uninterrupted():
                started.append(_start(command, rank, interface, folder))
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                # The whole process group: a worker starts `tc` and `ss`.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the block ends."""
    # A signal between a worker's start and its entry in the list would leave the worker running.
    # Blocking the signals does not help: another thread of NumPy would get them, and Python still
    # runs the handler in this one.
    came: list[int] = []
    delayed = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in delayed}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _start(
    command: list[str], rank: int, interface: str, folder: Path
) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, **_ENVIRONMENT, "GLOO_SOCKET_IFNAME": interface}
    with (folder / f"out{rank}").open("wb") as out, (folder / f"err{rank}").open("wb") as err:
        return subprocess.Popen(
            command,
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def _follow(
    workers: list["subprocess.Popen[bytes]"], lines: TextIO, folder: Path, timeout: float
) -> Iterator[dict[str, Any]]:
    deadline = time.monotonic() + timeout
    running = True
    while running:
        # Check before the last read, so that nothing a worker wrote before its end is missed.
        running = any(worker.poll() is None for worker in workers)
        for line in _whole_lines(lines):
            deadline = time.monotonic() + timeout
            yield json.loads(line)
        for rank, worker in enumerate(workers):
            if worker.poll():
                raise LaunchError(f"rank {rank} failed:\n{_tail(folder / f'err{rank}')}")
        if time.monotonic() > deadline:
            raise LaunchError(f"no result within {timeout:.0f} s:\n{_tail(folder / 'err0')}")
        time.sleep(0.1)


def _whole_lines(lines: TextIO) -> Iterator[str]:
    while True:
        start = lines.tell()
        line = lines.readline()
        if not line.endswith("\n"):
            # The worker is still writing this line: read it again later.
            lines.seek(start)
            return
        yield line


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-_TAIL:])
