"""Measure the accuracy at the end of the schedule with one method, on one rank."""

import gc
import math
from dataclasses import dataclass

import torch.distributed as dist

from benchmarks.net import data, models
from benchmarks.net.job import Job
from benchmarks.net.methods import Course, attach
from benchmarks.net.training import Training, test
from torchcomp import NonFiniteError


@dataclass(frozen=True)
class FinalAccuracy:
    """One rank's weights at the end: accuracy as a fraction, and mean loss.

    A run that diverges has accuracy 0 and an infinite loss, with every method.
    """

    accuracy: float
    loss: float
    steps: int


class FinalBench:
    """Trains one method after another to the end of the schedule."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        train, self.tested = data.digits(models.SIZES[job.model])
        if job.held_out:
            train, self.tested = data.hold_out(train)
        self.training = Training(job, rank, train)

    def measure(self, method: str, seed: int, lr: float) -> FinalAccuracy:
        module = models.build(self.job.model, seed)
        total = self.training.total
        trainee = attach(method, module, Course(lr, total, self.training.warm_up))
        try:
            for step in range(total):
                self.training.step(trainee, step, seed, lr)
            accuracy, loss = test(trainee, self.tested)
            # Baselines train on with NaN, and some class is then always "right".
            if not math.isfinite(loss):
                accuracy, loss = 0.0, math.inf
            return FinalAccuracy(accuracy, loss, total)
        except NonFiniteError:
            # Raised on every rank in the same step.
            return FinalAccuracy(0.0, math.inf, total)
        finally:
            # PyTorch's hooks may still send when a rank has finished its last step.
            dist.barrier()
            trainee.close()
            # Objects in reference cycles would otherwise keep this model in memory.
            del trainee, module
            gc.collect()
