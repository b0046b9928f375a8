"""One schedule, trained with several seeds, with all ranks and seeds side by side in this process.

A step of a small model on a rank takes less time than its wait for the other ranks. The schedule
decides when to average, by :func:`torchcomp.sync_steps`. Tests compare the results with those of
``torchcomp.LocalSGD`` and of plain DDP: they are equal.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchcomp
from recipes.image_data.augment import Augmentation
from recipes.image_data.in_memory import Split
from recipes.image_data.order import TrainOrder
from recipes.qsr.settings import PARALLEL, Point, Setting
from recipes.qsr.task import (
    PRESET,
    SAMPLES,
    average_over_ranks,
    build,
    draw,
    first_models,
    inputs,
)

# Images that are augmented at a time. One call for an epoch of the digits is faster than 11.
_AUGMENTED = 1024
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Outcome:
    accuracy: float
    loss: float
    syncs: int  # number of averages of the parameters, or of the gradients
    nbytes: int  # bytes that one rank of processes would send, as the library counts them


def sync_steps(setting: Setting, point: Point) -> list[int]:
    """Return the steps after which the ranks average."""
    return torchcomp.sync_steps(
        "every(1)" if point.schedule == PARALLEL else point.schedule,
        lr=setting.lr_function(point.lr, SAMPLES),
        total_steps=setting.total_steps(SAMPLES),
        warmup_steps=setting.warmup_steps(SAMPLES),
    )


def train(setting: Setting, point: Point, seeds: Sequence[int], part: str) -> list[Outcome]:
    """Train with all seeds side by side; return the outcome of each."""
    total, ranks = setting.total_steps(SAMPLES), setting.ranks
    lr_at, ends = setting.lr_function(point.lr, SAMPLES), set(sync_steps(setting, point))
    drawn = [draw(seed, part, setting.label_noise) for seed in seeds]
    # All ranks start with the same weights.
    model = build(setting.model, [*seeds] * ranks)
    optimizer = build_optimizer(setting, point, model)
    stream = batches(setting, seeds, [each for each, _ in drawn])
    for step, batch in enumerate(itertools.islice(stream, total)):
        optimizer.param_groups[0]["lr"] = lr_at(step)
        optimizer.zero_grad()
        loss_of(model, shard(batch, ranks)).backward()
        if point.schedule == PARALLEL:
            average_over_ranks(model, ranks, gradients=True)
        optimizer.step()
        if step + 1 in ends and point.schedule != PARALLEL:
            average_over_ranks(model, ranks)
    one = sum(parameter.numel() for parameter in model.parameters()) // (ranks * len(seeds))
    dense_bytes = torchcomp.explain("mean", numel=one, world_size=ranks).dense_bytes_sent
    # Every run ends with an average: all ranks have the same weights.
    scores = evaluate(first_models(model, len(seeds)), [each for _, each in drawn])
    return [Outcome(*score, len(ends), len(ends) * dense_bytes) for score in scores]


def shard(batch: Batch, ranks: int) -> Batch:
    """Return (N, S, ...) as (N / K, K * S, ...): each of K ranks takes a slice of the batch."""
    images, labels = (
        each.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2) for each in batch
    )
    return images, labels


def build_optimizer(setting: Setting, point: Point, model: nn.Module) -> torch.optim.Optimizer:
    parameters, lr, decay = model.parameters(), point.lr, point.weight_decay
    if setting.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=decay, fused=True)
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=decay, fused=True)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum of the models' losses, so that each gets the gradient of its own."""
    images, labels = batch
    mean = cross_entropy(model(images).flatten(0, 1), labels.flatten())
    return mean * labels.shape[1]


def batches(setting: Setting, seeds: Sequence[int], parts: Sequence[Split]) -> Iterator[Batch]:
    """Yield inputs (N, S, C, H, W) and labels (N, S) of all ranks, epoch after epoch."""
    orders = [TrainOrder(SAMPLES, setting.batch, 0, 1, seed) for seed in seeds]
    steps = max(1, _AUGMENTED // setting.batch)
    for epoch in itertools.count():
        rows = [torch.from_numpy(order.batches(epoch)).split(steps) for order in orders]
        for number, blocks in enumerate(zip(*rows, strict=True)):
            each = list(zip(orders, parts, blocks, strict=True))
            images = [_augmented(*one, epoch, number) for one in each]
            labels = [part.labels[block] for _, part, block in each]
            yield from zip(torch.stack(images, 2), torch.stack(labels, 2), strict=True)


def _augmented(order: TrainOrder, part: Split, rows: Tensor, epoch: int, block: int) -> Tensor:
    """Return the inputs of some steps, (steps, batch, C, H, W), for indices (steps, batch)."""
    augmentation = Augmentation(PRESET, replace(order, batch_size=rows.numel()))
    images = augmentation(part.images[rows.flatten()], epoch, block)
    return inputs(images).unflatten(0, rows.shape)


@torch.no_grad()
def evaluate(model: nn.Module, parts: Sequence[Split]) -> list[tuple[float, float]]:
    """Return accuracy in per cent and mean loss of models side by side, each on its own images."""
    model.eval()
    scores = model(torch.stack([inputs(part.images) for part in parts], dim=1))
    return [_score(own, part.labels) for own, part in zip(scores.unbind(1), parts, strict=True)]


def _score(scores: Tensor, labels: Tensor) -> tuple[float, float]:
    # The worst score, so that no tuning chooses it.
    if not scores.isfinite().all():
        return 0.0, float("inf")
    correct = (scores.argmax(1) == labels).float().mean()
    # Rounded as in the files, so that a resumed run chooses the same points of the grid.
    return round(100 * float(correct), 3), round(float(cross_entropy(scores, labels)), 4)
