"""One training run on this rank: plain DDP, or local steps by ``torchcomp.LocalSGD``."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from recipes.image_data.augment import Augmentation
from recipes.image_data.order import TrainOrder
from recipes.qsr.task import Part, Task
from torchcomp.learning_rates import LRFunction, cosine, warmed_up

FINAL_RATE = 1e-6
PARALLEL = "parallel"
BN_IMAGES = 4096


@dataclass(frozen=True)
class Length:
    """How long every run is.

    Attributes:
        batch: images a step, over all ranks.
        epochs: passes over the training part.
        warmup_epochs: of them, with a rising learning rate.
    """

    batch: int
    epochs: int
    warmup_epochs: int

    def steps(self, samples: int) -> int:
        """T."""
        return self.epochs * (samples // self.batch)

    def warmup_steps(self, samples: int) -> int:
        """W."""
        return self.warmup_epochs * (samples // self.batch)


@dataclass(frozen=True)
class Outcome:
    """What a run ended with.

    Attributes:
        accuracy: of the averaged model, in per cent.
        loss: its mean cross-entropy.
        syncs: averages of the parameters, or of the gradients.
        nbytes: bytes that one rank sent, by the library's count.
    """

    accuracy: float
    loss: float
    syncs: int
    nbytes: int


DIVERGED = Outcome(0.0, float("inf"), 0, 0)


def rate_of(peak: float, total_steps: int, warmup_steps: int) -> LRFunction:
    """Return the learning rate of every step: linear warm-up, then cosine decay."""
    decay = partial(cosine, peak=peak, final=FINAL_RATE, total=total_steps - warmup_steps)
    rate = partial(warmed_up, peak=peak, final=FINAL_RATE, steps=warmup_steps)
    return partial(rate, rate=lambda step: decay(step - warmup_steps))


def run(
    task: Task, schedule: str, *, lr: float, seed: int, length: Length, judged: Part
) -> Outcome:
    """Train on all ranks with one seed, and judge the averaged model; all ranks call this.

    Args:
        task: data and model.
        schedule: "parallel", or when the parameters are averaged.
        lr: peak learning rate.
        seed: of weights, order and augmentation.
        length: batch and epochs.
        judged: the part that accuracy and loss are of.
    """
    samples = len(task.train.labels)
    total, warmup = length.steps(samples), length.warmup_steps(samples)
    model = DistributedDataParallel(task.build(seed))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4, fused=True
    )
    sync = None
    if schedule != PARALLEL:
        horizon = {"total_steps": total, "warmup_steps": warmup}
        sync = torchcomp.LocalSGD(model, optimizer, schedule, **horizon)
    order = TrainOrder(samples, length.batch, dist.get_rank(), dist.get_world_size(), seed)
    rate = rate_of(lr, total, warmup)
    try:
        for step, batch in enumerate(itertools.islice(batches(task, order), total)):
            optimizer.param_groups[0]["lr"] = rate(step)
            train_step(model, optimizer, batch)
        syncs, nbytes = _traffic(sync, model, total)
    except torchcomp.NonFiniteError:
        return DIVERGED
    finally:
        if sync is not None:
            sync.close()
    if sync is not None and task.normalises:
        images = (inputs for inputs, _ in batches(task, order, first_epoch=length.epochs))
        torchcomp.reestimate_batchnorm(model, images, BN_IMAGES)
    return Outcome(*judge(model.module, task, judged), syncs, nbytes)


def batches(task: Task, order: TrainOrder, first_epoch: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's inputs and labels, epoch after epoch."""
    augmentation = Augmentation(task.preset, order)
    for epoch in itertools.count(first_epoch):
        for step, rows in enumerate(torch.from_numpy(order.batches(epoch))):
            images = augmentation(task.train.images[rows], epoch, step)
            yield task.inputs(images), task.train.labels[rows]


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> None:
    """Take one step of this rank's optimizer."""
    inputs, labels = batch
    optimizer.zero_grad()
    cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def _traffic(sync: Any, model: DistributedDataParallel, steps: int) -> tuple[int, int]:
    if sync is not None:
        return sync.stats.syncs, sync.stats.total_bytes_sent
    plan = torchcomp.explain("mean", model=model, world_size=dist.get_world_size())
    return steps, steps * plan.dense_bytes_sent


@torch.no_grad()
def judge(model: nn.Module, task: Task, part: Part) -> tuple[float, float]:
    """Return accuracy, in per cent, and mean loss of a part of the data."""
    model.eval()
    scores = torch.cat([model(task.inputs(some)) for some in part.images.split(1000)])
    if not scores.isfinite().all():
        return DIVERGED.accuracy, DIVERGED.loss
    correct = (scores.argmax(1) == part.labels).float().mean()
    return 100 * float(correct), float(cross_entropy(scores, part.labels))
