"""One rank's training of a model on the digits.

The schedule is that of recipes/configs/digits.yaml: 24 epochs, cosine after two epochs of warm-up.
Every rank has its own images.
"""

import math

import torch

from benchmarks.net import data
from benchmarks.net.job import Job
from benchmarks.net.methods import Trainee

_EPOCHS, _WARM_UP_EPOCHS = 24, 2


class Training:
    """The steps of a run.

    Attributes:
        total: number of steps.
        warm_up: number of warm-up steps.
    """

    def __init__(self, job: Job, rank: int, images: data.Images) -> None:
        self._job, self._rank, self._images = job, rank, images
        per_epoch = len(images) // job.world // job.batch
        self.total, self.warm_up = _EPOCHS * per_epoch, _WARM_UP_EPOCHS * per_epoch

    def step(self, trainee: Trainee, step: int, seed: int, lr: float) -> None:
        """Take one step, at the learning rate that the schedule has for the peak `lr`."""
        job = self._job
        rows = data.shard(self._images, job.batch, self._rank, job.world, step, seed)
        images, labels = self._images.take(rows)
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


@torch.no_grad()
def test(trainee: Trainee, images: data.Images) -> tuple[float, float]:
    """Return the accuracy of this rank's weights, as a fraction, and the mean loss."""
    trainee.model.module.eval()
    scores = trainee.model.module(images.images)
    trainee.model.module.train()
    right = (scores.argmax(1) == images.labels).float().mean()
    return float(right), float(torch.nn.functional.cross_entropy(scores, images.labels))
