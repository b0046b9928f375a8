"""One training run with a large batch and warm-up, by one method and one optimizer."""

import json
import math
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import torchcomp
from recipes.jointspar.methods import Dense, LayerSampling, Method, TopK, check_optimizer
from torchcomp.jointspar import LARS, Sampling


class TrainingData(Protocol):
    """The data that a run trains on and is tested on."""

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's images and labels at a step."""

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Return the accuracy in per cent on the held-out images and on the test images."""


@dataclass(frozen=True)
class Hyperparameters:
    """The length of a run in optimizer steps, and the settings of the optimizer.

    Attributes:
        steps: steps of the whole run.
        warmup: steps of the warm-up, during which the learning rate rises linearly to ``lr``.
        drops: steps at which the learning rate is divided by 10.
        lr: the peak learning rate.
        optimizer: one of :data:`recipes.jointspar.methods.OPTIMIZERS`.
        momentum: its momentum.
        weight_decay: its weight decay. Biases and norms have none.
        trust: LARS's trust coefficient.
    """

    steps: int
    warmup: int
    drops: tuple[int, ...]
    lr: float
    optimizer: str = "lars"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    trust: float = 0.01

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return float(self.lr * 0.1 ** sum(step >= drop for drop in self.drops))


def paper_schedule(steps: int, lr: float, optimizer: str = "lars") -> Hyperparameters:
    """Return the paper's schedule, shortened: warm-up for 5 of 90 epochs, drops at 30, 50, 70."""
    drops = tuple(steps * part // 9 for part in (3, 5, 7))
    return Hyperparameters(steps, max(1, steps // 18), drops, lr, optimizer)


@dataclass(frozen=True)
class Outcome:
    """The measurements of a finished run on this rank.

    Attributes:
        validation: accuracy on the held-out images in per cent, or NaN if training diverged.
        test: accuracy on the test images in per cent, or NaN if training diverged.
        bytes_share: bytes sent, as a share of dense DDP's.
        step_ms: median milliseconds of a step.
        backward_ms: median milliseconds of the backward pass, which includes the exchange.
        seconds: duration of all steps, without evaluation.
    """

    validation: float
    test: float
    bytes_share: float
    step_ms: float
    backward_ms: float
    seconds: float


def train(
    module: nn.Module,
    data: TrainingData,
    method: Method,
    hyperparameters: Hyperparameters,
    seed: int,
    log: Path | None = None,
) -> Outcome:
    """Train on this rank's part of every batch.

    Args:
        module: the network. All ranks must pass the same weights.
        data: the data to train and test on.
        method: how gradients are exchanged.
        hyperparameters: length of the run, learning rate, and the optimizer's settings.
        seed: seed of JointSpar's draws.
        log: file for one line of metrics per step, written by rank 0.
    """
    check_optimizer(method, hyperparameters.optimizer)
    model = DistributedDataParallel(module)
    exchange = attach(method, model, seed)
    optimizer = build_optimizer(
        model, hyperparameters, exchange if isinstance(method, LayerSampling) else None
    )
    with ExitStack() as stack:
        writing = log is not None and dist.get_rank() == 0
        file = stack.enter_context(log.open("w")) if log is not None and writing else None
        trainer = _Trainer(model, optimizer, data, hyperparameters)
        for step in range(hyperparameters.steps):
            if not trainer.step(step):
                break
            if file is not None:
                row = exchange.stats.row() if isinstance(method, LayerSampling) else {}
                file.write(json.dumps({**row, "step": step + 1, "loss": trainer.loss}) + "\n")
    stats = exchange.stats
    share = stats.total_bytes_sent / max(stats.total_dense_bytes_sent, 1)
    found = data.evaluate(model) if trainer.finite else (math.nan, math.nan)
    exchange.close()
    return trainer.outcome(found, share)


def attach(method: Method, model: DistributedDataParallel, seed: int) -> Any:
    """Install a method, and return its handle."""
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
    model: nn.Module, hyperparameters: Hyperparameters, sampled: Sampling | None = None
) -> Optimizer:
    """Return the optimizer. Only ``lars`` asks ``sampled`` for the norms of undivided gradients."""
    lr, momentum = hyperparameters.lr, hyperparameters.momentum
    decay = hyperparameters.weight_decay
    if hyperparameters.optimizer == "sgd":
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        weights = [p for p in model.parameters() if p.dim() > 1]
        groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": decay}]
        return SGD([*groups, {"params": vectors}], lr, momentum=momentum)
    return LARS(
        model.parameters(),
        lr,
        momentum=momentum,
        weight_decay=decay,
        trust_coefficient=hyperparameters.trust,
        exclude_vectors=True,
        sampled=sampled if hyperparameters.optimizer == "lars" else None,
    )


def topk_of_share(model: DistributedDataParallel, share: float) -> str:
    """Return the spec of TopK with error feedback that sends this share of dense DDP's bytes."""
    # Bytes depend on index coding and bucketing, so bisect for the ratio on the plan.
    low, high = 0.0, 1.0
    for _ in range(20):
        ratio = (low + high) / 2
        plan = torchcomp.explain(
            f"ef(topk({ratio!r}))", model=model.module, world_size=dist.get_world_size()
        )
        if plan.bytes_sent < share * plan.dense_bytes_sent:
            low = ratio
        else:
            high = ratio
    return f"ef(topk({round(high, 6)!r}))"


class _Trainer:
    """Takes the steps of one run, and measures their time."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        data: TrainingData,
        hyperparameters: Hyperparameters,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._data, self._hyperparameters = data, hyperparameters
        self._device = next(model.parameters()).device
        self._steps: list[float] = []
        self._backwards: list[float] = []
        self.finite = True
        self.loss = math.nan

    def step(self, step: int) -> bool:
        """Take a step, and return whether the gradients of all ranks are finite."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._hyperparameters.lr_at(step)
        images, labels = (part.to(self._device) for part in self._data.batch(step))
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        loss = cross_entropy(self._model(images), labels)
        self.loss = float(loss.detach())
        computed = time.perf_counter()
        try:
            loss.backward()
        except torchcomp.NonFiniteError:
            # Raised on every rank at the same step, so all of them stop together.
            self.finite = False
            return False
        self._backwards.append(time.perf_counter() - computed)
        self._optimizer.step()
        self._steps.append(time.perf_counter() - begin)
        return True

    def outcome(self, found: tuple[float, float], share: float) -> Outcome:
        """Return the measurements of the run."""
        step_ms, backward_ms = (
            1000 * statistics.median(times or [math.nan])
            for times in (self._steps, self._backwards)
        )
        return Outcome(*found, share, step_ms, backward_ms, sum(self._steps))
