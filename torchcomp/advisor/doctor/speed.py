"""Speed: how fast each rank computes, all of them at the same time."""

import statistics
import time
from dataclasses import dataclass

import torch

from torchcomp.advisor.doctor.job import Job
from torchcomp.advisor.doctor.quartiles import quartiles

_WINDOWS = 6
_SECONDS = 0.15
_SIDE = {"cpu": 256, "cuda": 4096}


@dataclass(frozen=True)
class Speed:
    """How long one rank took for the same matrix products as the others.

    Attributes:
        seconds: of each window.
        busy: share of these seconds in which the process ran on a core. On a GPU, 1.
    """

    seconds: tuple[float, ...]
    busy: float

    @property
    def median(self) -> float:
        """Seconds of a window."""
        return statistics.median(self.seconds)

    @property
    def low(self) -> float:
        """Seconds that a quarter of the windows do not exceed."""
        return quartiles(self.seconds)[0]

    @property
    def high(self) -> float:
        """Seconds that three quarters of the windows do not exceed."""
        return quartiles(self.seconds)[1]

    def with_windows_of(self, other: "Speed") -> "Speed":
        """Return both measurements as one."""
        return Speed(self.seconds + other.seconds, (self.busy + other.busy) / 2)


def measure_speed(job: Job, name: str) -> list[Speed]:
    """Compute on all ranks at the same time, and return the speed of each.

    Args:
        job: this rank.
        name: name of the measurement, used once.
    """
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
