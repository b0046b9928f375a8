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

FINAL_LR = 1e-6
PARALLEL = "parallel"
# As many training images re-estimate the statistics of BatchNorm after the last average.
BN_IMAGES = 4096


@dataclass(frozen=True)
class Length:
    """The batch and the epochs of every run.

    Attributes:
        batch: images per step, summed over all ranks.
        epochs: passes over the training part.
        warmup_epochs: how many of them have a rising learning rate.
    """

    batch: int
    epochs: int
    warmup_epochs: int

    def steps(self, samples: int) -> int:
        """Return T, the number of steps."""
        return self.epochs * (samples // self.batch)

    def warmup_steps(self, samples: int) -> int:
        """Return W, the number of steps of warm-up."""
        return self.warmup_epochs * (samples // self.batch)


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        accuracy: of the averaged model, in per cent.
        loss: its mean cross-entropy.
        syncs: number of averages of the parameters, or of the gradients.
        nbytes: bytes that one rank sent, as the library counts them.
    """

    accuracy: float
    loss: float
    syncs: int
    nbytes: int


# The worst outcome, so that no tuning chooses it.
DIVERGED = Outcome(0.0, float("inf"), 0, 0)


def lr_function(peak: float, total_steps: int, warmup_steps: int) -> LRFunction:
    """Return the learning rate as a function of the step: linear warm-up, then cosine decay."""
    decay = partial(cosine, peak=peak, final=FINAL_LR, total=total_steps - warmup_steps)
    warmup = partial(warmed_up, peak=peak, final=FINAL_LR, steps=warmup_steps)
    return partial(warmup, after=lambda step: decay(step - warmup_steps))


def train(
    task: Task, schedule: str, *, lr: float, seed: int, length: Length, evaluated: Part
) -> Outcome:
    """Train with one seed and evaluate the averaged model; all ranks call this.

    Args:
        task: data and model.
        schedule: "parallel", or the spec string of a schedule of averages.
        lr: peak learning rate.
        seed: of weights, order and augmentation.
        length: batch and epochs.
        evaluated: the part that accuracy and loss are measured on.
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
    lr_at = lr_function(lr, total, warmup)
    try:
        for step, batch in enumerate(itertools.islice(batches(task, order), total)):
            optimizer.param_groups[0]["lr"] = lr_at(step)
            train_step(model, optimizer, batch)
        syncs, nbytes = _traffic(sync, model, total)
    except torchcomp.NonFiniteError:
        # It is raised on every rank, so all ranks return the same outcome.
        return DIVERGED
    finally:
        if sync is not None:
            sync.close()
    # Local steps average no buffers of BatchNorm, so each rank has statistics of its own here.
    if sync is not None and task.normalises:
        images = (inputs for inputs, _ in batches(task, order, first_epoch=length.epochs))
        torchcomp.reestimate_batchnorm(model, images, BN_IMAGES)
    return Outcome(*evaluate(model.module, task, evaluated), syncs, nbytes)


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
    # DDP has no counter. Its traffic per step is what the plan of an uncompressed mean predicts.
    plan = torchcomp.explain("mean", model=model, world_size=dist.get_world_size())
    return steps, steps * plan.dense_bytes_sent


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, part: Part) -> tuple[float, float]:
    """Return accuracy in per cent and mean loss on a part of the data."""
    model.eval()
    scores = torch.cat([model(task.inputs(some)) for some in part.images.split(1000)])
    if not scores.isfinite().all():
        return DIVERGED.accuracy, DIVERGED.loss
    correct = (scores.argmax(1) == part.labels).float().mean()
    return 100 * float(correct), float(cross_entropy(scores, part.labels))
