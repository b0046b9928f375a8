"""One run on real ranks with a large batch and warm-up, by one method and one optimizer."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import torchcomp
from recipes.image_data.in_memory import Split, evaluate
from recipes.image_data.order import TrainOrder
from recipes.jointspar.methods import Dense, LayerSampling, Method, TopK
from torchcomp.jointspar import LARS, Sampling

# Different sizes, so that a budget in bytes differs from a budget in layers.
_HIDDEN = (32, 64, 128, 256, 128, 64, 32, 64, 128, 256)
Images = tuple[Split, Split, Split]
"""Images to train on, those held out of them to choose a learning rate, and test images."""


class ResidualMLP(nn.Module):
    """A stem, residual blocks of two layers, and a head; by default, sizes differ eightfold."""

    def __init__(
        self, inputs: int, classes: int, hidden: Sequence[int] = _HIDDEN, width: int = 64
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, wide), nn.ReLU(), nn.Linear(wide, width)
            )
            for wide in hidden
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images.flatten(1))
        for block in self.blocks:
            x = x + block(x)
        scores: Tensor = self.head(x)
        return scores


@dataclass
class Batches:
    """One rank's batches of images in memory, in the recipes' order."""

    images: Split
    order: TrainOrder

    def __post_init__(self) -> None:
        # The order of the current epoch is cached, because a permutation per step would be slow.
        self._epoch, self._rows = -1, torch.empty(0)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        epoch, index = divmod(step, self.order.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, torch.from_numpy(self.order.batches(epoch))
        chosen = self.images.take(self._rows[index])
        return chosen.images, chosen.labels


@dataclass(frozen=True)
class Schedule:
    """The length of a run in steps, its linear warm-up, and where the lr is divided by 10."""

    steps: int
    warmup: int
    drops: tuple[int, ...]
    lr: float

    @classmethod
    def of_paper(cls, steps: int, lr: float) -> "Schedule":
        """Return the paper's, shortened: warm-up for 5 of 90 epochs, drops at 30, 50, 70."""
        drops = tuple(steps * part // 9 for part in (3, 5, 7))
        return cls(steps, max(1, steps // 18), drops, lr)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return float(self.lr * 0.1 ** sum(step >= drop for drop in self.drops))


@dataclass(frozen=True)
class Outcome:
    """Accuracies in per cent, NaN if training diverged; the share of dense DDP's bytes; times."""

    validation: str
    test: str
    bytes_share: str
    step_ms: str  # median of the steps
    seconds: str  # of all steps, without evaluation


def train(
    module: nn.Module,
    images: Images,
    batch: int,
    method: Method,
    optimizer_name: str,
    schedule: Schedule,
    seed: int,
) -> Outcome:
    """Train on this rank's part of every batch. All ranks must pass the same weights."""
    order = TrainOrder(len(images[0].labels), batch, dist.get_rank(), dist.get_world_size(), seed)
    data = Batches(images[0], order)
    model = DistributedDataParallel(module)
    exchange = attach(method, model, seed)
    sampled = exchange if isinstance(method, LayerSampling) else None
    optimizer = build_optimizer(model, optimizer_name, schedule.lr, sampled)
    times = [time.perf_counter()]
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr_at(step)
        inputs, labels = data.batch(step)
        optimizer.zero_grad()
        try:
            cross_entropy(model(inputs), labels).backward()
        except torchcomp.NonFiniteError:
            # Raised on every rank at the same step, so all of them stop together.
            found = [math.nan, math.nan]
            break
        optimizer.step()
        times.append(time.perf_counter())
    else:
        found = [evaluate(module, part)[0] for part in images[1:]]
    share = exchange.stats.total_bytes_sent / max(exchange.stats.total_dense_bytes_sent, 1)
    exchange.close()
    step = median(after - before for before, after in pairwise(times)) if times[1:] else math.nan
    return Outcome(
        *(f"{accuracy:.3f}" for accuracy in found),
        *(f"{share:.4f}", f"{1000 * step:.2f}", f"{times[-1] - times[0]:.2f}"),
    )


def attach(method: Method, model: DistributedDataParallel, seed: int) -> Any:
    if isinstance(method, Dense):
        return torchcomp.register(model, "mean", seed=seed)
    if isinstance(method, TopK):
        return torchcomp.register(model, topk_of_share(model, method.budget), seed=seed)
    return torchcomp.JointSpar(
        model,
        budget=method.budget,
        costs=method.costs,
        selection=method.selection,
        rule=method.rule,
        p_min=method.p_min,
        compress="mean" if method.topk is None else topk_of_share(model, method.topk),
        seed=seed,
    )


def build_optimizer(
    model: nn.Module, name: str, lr: float, sampled: Sampling | None = None
) -> Optimizer:
    """Return the optimizer; only ``lars`` asks ``sampled`` for the norms of undivided gradients."""
    decay = 5e-4
    if name == "sgd":
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        weights = [p for p in model.parameters() if p.dim() > 1]
        groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": decay}]
        return SGD([*groups, {"params": vectors}], lr, momentum=0.9)
    return LARS(
        model.parameters(),
        lr,
        momentum=0.9,
        weight_decay=decay,
        trust_coefficient=0.01,
        exclude_vectors=True,
        sampled=sampled if name == "lars" else None,
    )


def topk_of_share(model: DistributedDataParallel, share: float) -> str:
    """Return the spec of TopK with error feedback that sends this share of dense DDP's bytes."""
    # Bytes depend on index coding and bucketing, so bisect for the ratio on the plan.
    low, high = 0.0, 1.0
    for _ in range(20):
        ratio = (low + high) / 2
        spec, ranks = f"ef(topk({ratio!r}))", dist.get_world_size()
        plan = torchcomp.explain(spec, model=model.module, world_size=ranks)
        if plan.bytes_sent < share * plan.dense_bytes_sent:
            low = ratio
        else:
            high = ratio
    return f"ef(topk({round(high, 6)!r}))"
