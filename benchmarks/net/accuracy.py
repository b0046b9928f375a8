"""Measure the time until one method reaches a target test accuracy, on one rank.

Every rank has its own images, so one rank alone cannot reach the target. Every few steps, rank 0
tests its own weights while the clock is stopped. The schedule is that of
recipes/configs/digits.yaml: 24 epochs, cosine after two epochs of warm-up.
"""

import math
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.net import counters, data, models
from benchmarks.net.job import Job
from benchmarks.net.methods import Course, Trainee, attached

_EVERY = 4  # steps between two tests
_EPOCHS, _WARM_UP_EPOCHS = 24, 2


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
        self._job, self._rank = job, rank
        self._train, self._test = data.digits(models.SIZES[job.model])
        per_epoch = len(self._train) // job.world // job.batch
        self._total, self._warm_up = _EPOCHS * per_epoch, _WARM_UP_EPOCHS * per_epoch

    def measure(self, method: str, seed: int, lr: float) -> RankAccuracy:
        module = models.build(self._job.model, seed)
        with attached(method, module, Course(lr, self._total, self._warm_up)) as trainee:
            return self._measure(trainee, seed, lr)

    def _measure(self, trainee: Trainee, seed: int, lr: float) -> RankAccuracy:
        # No rank must start the clock while another is still building its model.
        dist.barrier()
        before = counters.read(self._job.interface, self._job.port)
        seconds, steps, accuracy = 0.0, 0, 0.0
        while steps < self._total and accuracy < self._job.target:
            started = time.perf_counter()
            for step in range(steps, min(steps + _EVERY, self._total)):
                self._step(trainee, step, seed, lr)
            seconds += time.perf_counter() - started
            steps = min(steps + _EVERY, self._total)
            accuracy = self._accuracy(trainee)
        sent = counters.read(self._job.interface, self._job.port) - before
        reached = accuracy >= self._job.target
        return RankAccuracy(seconds, steps, accuracy, reached, payload=sent.payload, **asdict(sent))

    def _step(self, trainee: Trainee, step: int, seed: int, lr: float) -> None:
        job = self._job
        rows = data.shard(self._train, job.batch, self._rank, job.world, step, seed)
        images, labels = self._train.take(rows)
        for group in trainee.optimizer.param_groups:
            group["lr"] = lr * self._lr_factor(step)
        trainee.optimizer.zero_grad()
        cross_entropy(trainee.model(images), labels).backward()
        trainee.optimizer.step()

    def _lr_factor(self, step: int) -> float:
        """The learning rate of a step as a fraction of its peak; never 0."""
        if step < self._warm_up:
            return (step + 1) / self._warm_up
        done = (step - self._warm_up) / (self._total - self._warm_up)
        return (1 + math.cos(math.pi * done)) / 2

    @torch.no_grad()
    def _accuracy(self, trainee: Trainee) -> float:
        found = torch.zeros(1)
        if self._rank == 0:
            trainee.model.module.eval()
            scores = trainee.model.module(self._test.images)
            trainee.model.module.train()
            found[0] = (scores.argmax(1) == self._test.labels).float().mean()
        # All ranks need the result to stop together. The broadcast also synchronises them before
        # the clock starts again, so the test does not count as waiting time.
        dist.broadcast(found, src=0)
        return float(found)
