"""Measure the time until one method reaches a target test accuracy, on one rank.

The small CNN trains on the digits with the schedule of recipes/configs/digits.yaml: 24 epochs,
cosine after two epochs of warm-up. Every rank has its own images, so one rank alone cannot reach
the target. Every few steps, rank 0 tests its own weights while the clock is stopped.
"""

import gc
import math
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from benchmarks.net import counters, data, models
from benchmarks.net.job import Job
from benchmarks.net.methods import Course, Trainee, attach

_EPOCHS, _WARM_UP_EPOCHS = 24, 2
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


class AccuracyBench:
    """Trains one method after another to the target."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.train, self.test = data.digits(models.SIZES[job.model])
        per_epoch = len(self.train) // job.world // job.batch
        self.total, self.warm_up = _EPOCHS * per_epoch, _WARM_UP_EPOCHS * per_epoch

    def measure(self, method: str, seed: int, lr: float) -> RankAccuracy:
        module = models.build(self.job.model, seed)
        trainee = attach(method, module, Course(lr, self.total, self.warm_up))
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
        seconds, steps, accuracy = 0.0, 0, 0.0
        while steps < self.total and accuracy < self.job.target:
            started = time.perf_counter()
            for step in range(steps, min(steps + _EVERY, self.total)):
                self._step(trainee, step, seed, lr)
            seconds += time.perf_counter() - started
            steps = min(steps + _EVERY, self.total)
            accuracy = self._accuracy(trainee)
        sent = counters.read(self.job.interface, self.job.port) - before
        reached = accuracy >= self.job.target
        return RankAccuracy(seconds, steps, accuracy, reached, payload=sent.payload, **asdict(sent))

    def _step(self, trainee: Trainee, step: int, seed: int, lr: float) -> None:
        rows = data.shard(self.train, self.job.batch, self.rank, self.job.world, step, seed)
        images, labels = self.train.take(rows)
        for group in trainee.optimizer.param_groups:
            group["lr"] = lr * self._lr_factor(step)
        trainee.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(trainee.model(images), labels).backward()
        trainee.optimizer.step()

    def _lr_factor(self, step: int) -> float:
        """The learning rate of a step as a fraction of its peak; never 0."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        done = (step - self.warm_up) / (self.total - self.warm_up)
        return (1 + math.cos(math.pi * done)) / 2

    def _accuracy(self, trainee: Trainee) -> float:
        found = torch.zeros(1)
        if self.rank == 0:
            trainee.model.module.eval()
            with torch.no_grad():
                right = trainee.model.module(self.test.images).argmax(1) == self.test.labels
            trainee.model.module.train()
            found[0] = right.float().mean()
        # All ranks need the result to stop together. The broadcast also synchronises them before
        # the clock starts again, so the test does not count as waiting time.
        dist.broadcast(found, src=0)
        return float(found)
