"""A device to measure on: its clock, its caches, and counters of launches and waits.

All of it also works on the CPU, where a rehearsal runs the same benchmarks without a GPU. The
numbers of a rehearsal mean nothing.
"""

import importlib
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.net.rows import conditions

Work = Callable[[], object]

WAIT = "called a synchronizing CUDA operation"
"""What torch warns about in its sync debug mode."""

# Calls of CUDA that put work on a stream. On the CPU, a rehearsal counts torch's operators.
_LAUNCHES = {"cuda": r"cu(da)?(Launch|Memcpy|Memset|GraphLaunch)", "cpu": r"aten::"}
_LONGEST_HEAD_START = 0.05  # in seconds


@contextmanager
def counted_waits(kind: str) -> Iterator[list[str]]:
    """Collect the lines of code at which the host waits for a device of this kind.

    torch reports copies to the host and other operations that synchronise a stream. It does not
    report ``synchronize()`` of streams, events and devices. The list is filled as the block ends.
    """
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _sync_debug_mode(kind, "warn"):
            yield lines
    lines += [f"{w.filename}:{w.lineno}" for w in caught if WAIT in str(w.message)]


@contextmanager
def no_waits(kind: str) -> Iterator[None]:
    """Raise RuntimeError where the host would wait for a device of this kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        with _sync_debug_mode(kind, "error"):
            yield


@contextmanager
def _sync_debug_mode(kind: str, mode: str) -> Iterator[None]:
    if kind != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Device:
    """The device of one process.

    Args:
        kind: "cuda" or "cpu".
        index: number of the GPU.

    Attributes:
        place: the ``torch.device``.
    """

    def __init__(self, kind: str, index: int = 0) -> None:
        self.kind = kind
        self.place = torch.device(kind, index) if kind == "cuda" else torch.device(kind)
        self._cycles_per_second = 0.0
        if kind == "cuda":
            torch.cuda.set_device(self.place)
            self._cycles_per_second = self._calibrated()
        # Several times the L2 cache: writing to it removes all else from the cache.
        nbytes = 4 * _cache_bytes(self.place) if kind == "cuda" else 1024
        self._flush = torch.empty(nbytes, dtype=torch.uint8, device=self.place)

    def wait(self) -> None:
        """Wait until all work on the device is done."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.place)

    def milliseconds(self, work: Work, repeats: int, before: Work = lambda: None) -> float:
        """Return the median time of `work` on the device, with empty caches.

        The host gets a head start: a sleeping kernel holds the stream until most of the kernels of
        `work` are queued. The gaps between launches are therefore not part of the time, unless
        `work` waits for the device, or queues more than CUDA's queue can hold.

        Args:
            work: the calls to time.
            repeats: number of measurements, after two calls that compile.
            before: called before each `work`, outside the time.
        """
        for _ in range(2):
            before()
            work()
        head_start = self._head_start(work, before)
        return statistics.median(self._once(work, before, head_start) for _ in range(repeats))

    def host_microseconds(self, work: Work, repeats: int, before: Work = lambda: None) -> float:
        """Return the median time that the calling thread spends in `work`.

        The device is idle at its beginning. If `work` waits, the wait is part of the time.
        """
        return 1e6 * statistics.median(self._host_seconds(work, before) for _ in range(repeats))

    def launches(self, work: Work, before: Work = lambda: None) -> int | None:
        """Return how many kernels, copies and fills `work` launches; None if unknown."""
        before()
        self.wait()
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if self.kind == "cuda" else []
        with profile(activities=activities) as profiler:
            work()
            self.wait()
        pattern = re.compile(_LAUNCHES[self.kind])
        # A profiler that may not use CUPTI sees no call of CUDA at all.
        return sum(bool(pattern.match(event.name)) for event in profiler.events()) or None

    def waits(self, work: Work, before: Work = lambda: None) -> int:
        """Return how often the host waits for the device in `work`."""
        before()
        with counted_waits(self.kind) as lines:
            work()
        return len(lines)

    def mark(self) -> "torch.cuda.Event | float":
        """Return a point in time on the current stream, for :meth:`between`."""
        if self.kind != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two marks that the device has passed."""
        return (end - start) * 1e3 if self.kind != "cuda" else start.elapsed_time(end)

    def _once(self, work: Work, before: Work, head_start: int) -> float:
        before()
        self._flush.zero_()
        if self.kind == "cuda":
            torch.cuda._sleep(head_start)
        start = self.mark()
        work()
        end = self.mark()
        self.wait()
        return self.between(start, end)

    def _host_seconds(self, work: Work, before: Work) -> float:
        before()
        self.wait()
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def _head_start(self, work: Work, before: Work) -> int:
        """Cycles to sleep: somewhat longer than the host takes to launch `work`."""
        seconds = min(1.5 * self._host_seconds(work, before), _LONGEST_HEAD_START)
        return int(seconds * self._cycles_per_second)

    def _calibrated(self, cycles: int = 20_000_000) -> float:
        times = []
        for _ in range(2):  # the first call loads the kernel
            start = self.mark()
            torch.cuda._sleep(cycles)
            end = self.mark()
            self.wait()
            times.append(self.between(start, end))
        return cycles / times[-1] * 1e3


def _cache_bytes(place: torch.device) -> int:
    return int(getattr(torch.cuda.get_device_properties(place), "L2_cache_size", 1 << 26))


def _triton_version() -> str:
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return "none"


def described(device: Device, command: str, seed: int) -> dict[str, Any]:
    """Return the columns that every row has: where, when and with what it was measured."""
    common = conditions()
    name = torch.cuda.get_device_name(device.place) if device.kind == "cuda" else common["device"]
    return {
        "date": common["date"],
        "revision": common["revision"],
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": _triton_version(),
        "seed": seed,
        "command": command,
    }
