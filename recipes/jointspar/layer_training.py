"""One training run of LARS with a large batch and warm-up, and one way to exchange gradients."""

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

import torchcomp
from torchcomp.jointspar import LARS, Baseline

INNER_SHARE = 0.05
"""Share of dense DDP's bytes that "jointspar+topk" would send if it kept all layers."""


class TrainingData(Protocol):
    """The data that a run trains on and is tested on."""

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's images and labels at a step."""

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Return the accuracy in per cent on the held-out images and on the test images."""


@dataclass(frozen=True)
class Method:
    """How gradients are exchanged.

    Attributes:
        kind: "dense", "jointspar" (learned p), "uniform" (the same p for all layers), "topk" with
            error feedback, or "jointspar+topk" (TopK with error feedback on the kept layers).
        budget: share of dense DDP's bytes; for "jointspar+topk", share of the layers; 1 for dense.
        norm: the norm that LARS divides by. "running" is a running norm of the gradients before
            their division by p, which keeps the mean update. "own" is the norm of each gradient,
            which cancels 1 / p.
        costs: unit of the budget: "layers", "bytes" or "time".
    """

    kind: str
    budget: float = 1.0
    norm: str = "running"
    costs: str = "bytes"

    @property
    def family(self) -> str:
        """The method without its budget."""
        return self.kind if self.norm == "running" else f"{self.kind}, own norm"

    @property
    def samples(self) -> bool:
        """Whether the method keeps a random set of layers."""
        return self.kind in ("jointspar", "uniform", "jointspar+topk")


@dataclass(frozen=True)
class Hyperparameters:
    """The length of a run in optimizer steps, and the settings of LARS and JointSpar.

    Attributes:
        steps: steps of the whole run.
        warmup: steps of the warm-up, during which the learning rate rises linearly to ``lr``.
        drops: steps at which the learning rate is divided by 10.
        lr: the peak learning rate.
        momentum: momentum of LARS.
        weight_decay: weight decay of LARS. Biases and norms have none.
        trust: LARS's trust coefficient.
        p_min: JointSpar's minimum probability of a layer.
        alpha: step size of its bandit.
    """

    steps: int
    warmup: int
    drops: tuple[int, ...]
    lr: float
    momentum: float = 0.9
    weight_decay: float = 5e-4
    trust: float = 0.01
    p_min: float = 0.0125
    alpha: float = 0.01

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return float(self.lr * 0.1 ** sum(step >= drop for drop in self.drops))


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
    model = DistributedDataParallel(module)
    exchange = attach(method, model, hyperparameters, seed)
    optimizer = lars(model, hyperparameters, exchange if _divides_by_running(method) else None)
    with ExitStack() as stack:
        writing = log is not None and dist.get_rank() == 0
        file = stack.enter_context(log.open("w")) if log is not None and writing else None
        trainer = _Trainer(model, optimizer, data, hyperparameters)
        for step in range(hyperparameters.steps):
            if not trainer.step(step):
                break
            if file is not None:
                row = exchange.stats.row() if method.samples else {}
                file.write(json.dumps({**row, "step": step + 1, "loss": trainer.loss}) + "\n")
    stats = exchange.stats
    share = stats.total_bytes_sent / max(stats.total_dense_bytes_sent, 1)
    found = data.evaluate(model) if trainer.finite else (math.nan, math.nan)
    exchange.close()
    return trainer.outcome(found, share)


def attach(
    method: Method, model: DistributedDataParallel, hyperparameters: Hyperparameters, seed: int
) -> Any:
    """Install a method, and return its handle."""
    if method.kind == "dense":
        return torchcomp.register(model, "mean", seed=seed)
    if method.kind == "topk":
        return torchcomp.register(model, topk_of_share(model, method.budget), seed=seed)
    return torchcomp.JointSpar(
        model,
        budget=method.budget,
        costs=method.costs,
        rule=None if method.kind == "uniform" else Baseline(hyperparameters.alpha),
        compress=topk_of_share(model, INNER_SHARE) if method.kind == "jointspar+topk" else "mean",
        p_min=hyperparameters.p_min,
        seed=seed,
    )


def lars(model: nn.Module, hyperparameters: Hyperparameters, sampled: Any = None) -> LARS:
    """Return the LARS optimizer."""
    return LARS(
        model.parameters(),
        hyperparameters.lr,
        momentum=hyperparameters.momentum,
        weight_decay=hyperparameters.weight_decay,
        trust_coefficient=hyperparameters.trust,
        exclude_vectors=True,
        sampled=sampled,
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
        optimizer: LARS,
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


def _divides_by_running(method: Method) -> bool:
    return method.samples and method.norm == "running"
