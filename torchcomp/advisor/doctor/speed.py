"""Speed: how fast each rank computes, all of them at the same time."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchcomp.advisor.doctor.job import Job

_WINDOWS = 6
_SECONDS = 0.15
_SIDE = {"cpu": 256, "cuda": 4096}


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the values that a quarter, and three quarters, of all values do not exceed."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[(3 * len(ordered) - 1) // 4]


@dataclass(frozen=True)
class Speed:
    """How long one rank took for the same matrix products as the others."""

    seconds: tuple[float, ...]  # of each window
    busy: float  # share of these seconds in which the process ran on a core; 1 on a GPU

    @property
    def median(self) -> float:
        """Seconds of a window."""
        return statistics.median(self.seconds)

    def with_windows_of(self, other: "Speed") -> "Speed":
        """Return both measurements as one."""
        return Speed(self.seconds + other.seconds, (self.busy + other.busy) / 2)


def measure_speed(job: Job, name: str) -> list[Speed]:
    """Compute on all ranks at the same time, and return the speed of each; use a name once."""
    side = _SIDE[job.device.type]
    x = torch.full((side, side), 1 / side, device=job.device)
    _products(x, 3)  # starts threads and loads libraries
    count = max(1, round(_SECONDS * 10 / _products(x, 10)))
    # Rank 0 says how much: the work must be the same.
    count = job.gather(f"{name}/products", count)[0]
    _products(x, count)
    job.barrier(f"{name}/start")
    began, used = time.perf_counter(), time.process_time()
    seconds = [_products(x, count) for _ in range(_WINDOWS)]
    share = (time.process_time() - used) / (time.perf_counter() - began)
    busy = 1.0 if x.is_cuda else min(1.0, share / torch.get_num_threads())
    # A rank with a fifth of the others' speed takes five times as long.
    rows = job.gather(name, [seconds, busy], job.patience + 100 * _WINDOWS * _SECONDS)
    return [Speed(tuple(seconds), busy) for seconds, busy in rows]


def _products(x: torch.Tensor, count: int) -> float:
    """Multiply matrices, and return the seconds."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    began = time.perf_counter()
    y = x
    for _ in range(count):
        y = x @ y
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - began
