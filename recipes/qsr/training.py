"""One schedule, trained with several seeds: the loop, whatever the ranks are."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from recipes.image_data.augment import Augmentation
from recipes.image_data.order import TrainOrder
from recipes.qsr.settings import Setting
from recipes.qsr.task import Part, Task

PARALLEL = "parallel"
# The accuracy is measured as many times during a run, at equal distances.
CURVE_POINTS = 16
# Images that are augmented at a time. One call for an epoch of the digits is faster than 11.
_AUGMENTED = 1024
_EVALUATED = 1000
Batch = tuple[Tensor, Tensor]
Score = tuple[float, float]
"""Accuracy in per cent, and mean loss."""


@dataclass(frozen=True)
class Point:
    """What is tuned.

    Attributes:
        method: one of :data:`recipes.qsr.settings.METHODS`.
        schedule: "parallel", or the spec string of a schedule of averages.
        lr: peak learning rate.
        weight_decay: of all parameters.
    """

    method: str
    schedule: str
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        accuracy: of the averaged model, in per cent.
        loss: its mean cross-entropy.
        syncs: number of averages of the parameters, or of the gradients.
        nbytes: bytes that one rank sent, as the library counts them.
        curve: step and accuracy of the averaged model, at points of the run; often empty.
    """

    accuracy: float
    loss: float
    syncs: int
    nbytes: int
    curve: tuple[tuple[int, float], ...] = ()


# The worst score, so that no tuning chooses it.
DIVERGED: Score = (0.0, float("inf"))


class Ranks(Protocol):
    """The ranks of a run: processes, or models side by side in this one.

    Attributes:
        model: what the optimizer of this process trains.
    """

    model: nn.Module

    def shard(self, batch: Batch) -> Batch:
        """Return the part of a batch of all ranks, (N, S, ...), that goes through ``model``."""

    def start(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare for the first step."""

    def after_backward(self) -> None:
        """Average the gradients if the schedule is parallel training."""

    def after_step(self, step: int) -> None:
        """Average the parameters if a round ends after this step, counted from 1."""

    def averaged(self) -> nn.Module:
        """Return the mean models of the ranks, side by side for all seeds, as a copy."""

    def finish(self) -> tuple[int, int]:
        """End the run; return the number of averages, and the bytes that one rank sent."""


def train(
    task: Task,
    setting: Setting,
    point: Point,
    ranks: Ranks,
    *,
    seeds: Sequence[int],
    part: str,
    curve: bool,
) -> list[Outcome]:
    """Train with all seeds side by side and evaluate the averaged models.

    Args:
        task: the data.
        setting: model, optimizer and length.
        point: the schedule, and the tuned numbers.
        ranks: that hold the models.
        seeds: of the data, the weights, the order and the augmentation.
        part: "validation" for tuning or "test" for reporting.
        curve: whether the accuracy is also measured during the run.

    Returns:
        One outcome per seed.
    """
    total = setting.total_steps(task.samples)
    lr_at = setting.lr_function(point.lr, task.samples)
    drawn = [task.draw(seed, part) for seed in seeds]
    evaluated = [each for _, each in drawn]
    stream = batches(task, setting, seeds, [each for each, _ in drawn])
    optimizer = build_optimizer(setting, point, ranks.model)
    ranks.start(optimizer)
    marks = {round(total * i / CURVE_POINTS) for i in range(1, CURVE_POINTS)} if curve else set()
    found: list[tuple[int, list[Score]]] = []
    for step, batch in enumerate(itertools.islice(stream, total)):
        if step in marks:
            found.append((step, evaluate(ranks.averaged(), task, evaluated)))
        optimizer.param_groups[0]["lr"] = lr_at(step)
        optimizer.zero_grad()
        loss_of(ranks.model, ranks.shard(batch)).backward()
        ranks.after_backward()
        optimizer.step()
        ranks.after_step(step + 1)
    syncs, nbytes = ranks.finish()
    found.append((total, evaluate(ranks.averaged(), task, evaluated)))
    return [
        Outcome(
            *found[-1][1][i],
            *(syncs, nbytes),
            tuple((step, scores[i][0]) for step, scores in found) if curve else (),
        )
        for i in range(len(seeds))
    ]


def build_optimizer(setting: Setting, point: Point, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of one rank."""
    parameters, lr, decay = model.parameters(), point.lr, point.weight_decay
    if setting.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=decay, fused=True)
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=decay, fused=True)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum of the models' losses, so that each gets the gradient of its own."""
    inputs, labels = batch
    mean = cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    return mean * labels.shape[1]


def batches(
    task: Task,
    setting: Setting,
    seeds: Sequence[int],
    parts: Sequence[Part],
    first_epoch: int = 0,
) -> Iterator[Batch]:
    """Yield inputs (N, S, C, H, W) and labels (N, S) of all ranks, epoch after epoch.

    Args:
        task: of the data.
        setting: for the size N of a batch.
        seeds: of order and augmentation.
        parts: the training images of each seed.
        first_epoch: to begin with.
    """
    orders = [TrainOrder(task.samples, setting.batch, 0, 1, seed) for seed in seeds]
    steps = max(1, _AUGMENTED // setting.batch)
    for epoch in itertools.count(first_epoch):
        rows = [torch.from_numpy(order.batches(epoch)).split(steps) for order in orders]
        for number, blocks in enumerate(zip(*rows, strict=True)):
            each = list(zip(orders, parts, blocks, strict=True))
            inputs = [_augmented(task, *one, epoch, number) for one in each]
            labels = [part.labels[block] for _, part, block in each]
            yield from zip(torch.stack(inputs, 2), torch.stack(labels, 2), strict=True)


def _augmented(
    task: Task, order: TrainOrder, part: Part, rows: Tensor, epoch: int, block: int
) -> Tensor:
    """Return the inputs of some steps, (steps, batch, C, H, W), for indices (steps, batch)."""
    augmentation = Augmentation(task.preset, replace(order, batch_size=rows.numel()))
    images = augmentation(part.images[rows.flatten()], epoch, block)
    return task.inputs(images).unflatten(0, rows.shape)


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, parts: Sequence[Part]) -> list[Score]:
    """Return the scores of models that are side by side, each on its own images."""
    model.eval()
    chunks = zip(*(part.images.split(_EVALUATED) for part in parts), strict=True)
    scores = torch.cat(
        [model(torch.stack([task.inputs(own) for own in each], dim=1)) for each in chunks]
    )
    return [_score(own, part.labels) for own, part in zip(scores.unbind(1), parts, strict=True)]


def _score(scores: Tensor, labels: Tensor) -> Score:
    if not scores.isfinite().all():
        return DIVERGED
    correct = (scores.argmax(1) == labels).float().mean()
    # Rounded as in the files, so that a resumed run chooses the same points of the grid.
    return round(100 * float(correct), 3), round(float(cross_entropy(scores, labels)), 4)
