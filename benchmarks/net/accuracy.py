"""Measure the time until one method reaches a target test accuracy, on one rank.

Every rank has its own images, so one rank alone cannot reach the target. Every few steps, rank 0
tests its own weights while the clock is stopped.
"""

import gc
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from benchmarks.net import counters, data, models
from benchmarks.net.job import Job
from benchmarks.net.methods import Course, Trainee, attach
from benchmarks.net.training import Training, test

# Steps between two tests.
_EVERY = 4


@dataclass(frozen=True)
class RankAccuracy:
    """What one rank measured until the target or the end of the schedule."""

    seconds: float
    steps: int
    accuracy: float
    reached: bool
    wire: int
    payload: int
    packets: int
    tcp: int
    inside: int


class AccuracyBench:
    """Trains one method after another to the target."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        train, self.test = data.digits(models.SIZES[job.model])
        self.training = Training(job, rank, train)

    def measure(self, method: str, seed: int, lr: float) -> RankAccuracy:
        module = models.build(self.job.model, seed)
        course = Course(lr, self.training.total, self.training.warm_up)
        trainee = attach(method, module, course)
        try:
            return self._measure(trainee, seed, lr)
        finally:
            trainee.close()
            # Objects in reference cycles would otherwise keep this model in memory.
            del trainee, module
            gc.collect()

    def _measure(self, trainee: Trainee, seed: int, lr: float) -> RankAccuracy:
        # No rank must start the clock while another is still building its model.
        dist.barrier()
        before = counters.read(self.job.interface, self.job.port)
        seconds, steps, accuracy, total = 0.0, 0, 0.0, self.training.total
        while steps < total and accuracy < self.job.target:
            started = time.perf_counter()
            for step in range(steps, min(steps + _EVERY, total)):
                self.training.step(trainee, step, seed, lr)
            seconds += time.perf_counter() - started
            steps = min(steps + _EVERY, total)
            accuracy = self._accuracy(trainee)
        sent = counters.read(self.job.interface, self.job.port) - before
        reached = accuracy >= self.job.target
        return RankAccuracy(seconds, steps, accuracy, reached, payload=sent.payload, **asdict(sent))

    def _accuracy(self, trainee: Trainee) -> float:
        found = torch.zeros(1)
        if self.rank == 0:
            found[0], _ = test(trainee, self.test)
        # All ranks need the result to stop together. The broadcast also synchronises them before
        # the clock starts again, so the test does not count as waiting time.
        dist.broadcast(found, src=0)
        return float(found)
