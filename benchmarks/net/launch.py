"""Start one worker a host, hand on what rank 0 reports line by line, and end them all."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from net.job import Job

_BENCHMARKS = Path(__file__).parents[1]
# One thread per rank; idle threads that spin would take the core from another rank.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
_TAIL = 15


class LaunchError(RuntimeError):
    """A worker failed, or was silent for too long."""


def results(job: Job, prefixes: list[list[str]]) -> Iterator[dict[str, Any]]:
    """Run `job` with one worker behind each command prefix; yield rank 0's results as they come.

    Raises:
        LaunchError: with the last lines of the worker that failed first.
    """
    worker = [sys.executable, "-m", "net.worker"]
    commands = [[*prefix, *worker, str(r), job.to_json()] for r, prefix in enumerate(prefixes)]
    yield from lines_of(commands, job.interface, job.timeout)


def lines_of(commands: list[list[str]], interface: str, timeout: float) -> Iterator[dict[str, Any]]:
    """Run one command per rank; yield the lines of JSON that the first prints, as they come.

    Args:
        commands: by rank.
        interface: the network device that gloo takes.
        timeout: seconds without a line after which all are ended.

    Raises:
        LaunchError: with the last lines of the worker that failed first.
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
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let signals wait: one between a worker's start and its entry in the list would leave it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        # Workers inherit the block, which does no harm: they are ended by SIGKILL.
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(
    command: list[str], rank: int, interface: str, folder: Path
) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, **_ENVIRONMENT, "GLOO_SOCKET_IFNAME": interface}
    with (folder / f"out{rank}").open("wb") as out, (folder / f"err{rank}").open("wb") as err:
        return subprocess.Popen(
            command,
            cwd=_BENCHMARKS,
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
        # Looked at before the last read: what a worker wrote before it ended is not missed.
        running = any(worker.poll() is None for worker in workers)
        for line in _whole_lines(lines):
            deadline = time.monotonic() + timeout
            yield json.loads(line)
        for rank, worker in enumerate(workers):
            if worker.poll():
                raise LaunchError(f"rank {rank} failed:\n{_tail(folder / f'err{rank}')}")
        if time.monotonic() > deadline:
            raise LaunchError(f"no result in {timeout:.0f} s:\n{_tail(folder / 'err0')}")
        time.sleep(0.1)


def _whole_lines(lines: TextIO) -> Iterator[str]:
    while True:
        place = lines.tell()
        line = lines.readline()
        if not line.endswith("\n"):
            lines.seek(place)
            return
        yield line


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-_TAIL:])
