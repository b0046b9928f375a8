"""One training run: LARS at a large batch with warm-up, its gradients exchanged by one method."""

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
    """What a run trains on and is judged by."""

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's images and labels at a step."""

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Accuracy in per cent on images held out and on the test's."""


@dataclass(frozen=True)
class Method:
    """How gradients are exchanged.

    Attributes:
        kind: "dense", "jointspar" (learned p), "uniform" (the same p for all layers), "topk" with
            error feedback, or "jointspar+topk" (TopK with error feedback on the kept layers).
        budget: share of dense DDP's bytes, for "jointspar+topk" that of the layers; 1 for dense.
        norm: what LARS divides by: "running" norms of undivided gradients, which keeps the mean
            update, or each gradient's "own" norm, which cancels 1 / p.
        costs: what the budget counts, if not "bytes".
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
        """Whether it keeps a random set of layers."""
        return self.kind in ("jointspar", "uniform", "jointspar+topk")


@dataclass(frozen=True)
class Course:
    """The length and the rates of a run, in optimizer steps.

    Attributes:
        steps: of the whole run.
        warmup: of them, with a rate that rises linearly to `rate`.
        drops: steps at which the rate is divided by 10.
        rate: the peak rate.
        momentum: of LARS.
        weight_decay: of LARS; none on biases and norms.
        trust: LARS's trust coefficient.
        p_min: JointSpar's least probability.
        alpha: step size of its bandit.
    """

    steps: int
    warmup: int
    drops: tuple[int, ...]
    rate: float
    momentum: float = 0.9
    weight_decay: float = 5e-4
    trust: float = 0.01
    p_min: float = 0.0125
    alpha: float = 0.01

    def rate_at(self, step: int) -> float:
        """The rate of a step, counted from 0."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        return float(self.rate * 0.1 ** sum(step >= drop for drop in self.drops))


@dataclass(frozen=True)
class Outcome:
    """What a run came to, on this rank.

    Attributes:
        validation: accuracy on held-out images, per cent; NaN if training diverged.
        test: the same of the test images.
        bytes_share: bytes sent, as a share of dense DDP's.
        step_ms: milliseconds of a step, median.
        backward_ms: of its backward pass with the exchange, median.
        seconds: of all steps, without evaluation.
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
    course: Course,
    seed: int,
    log: Path | None = None,
) -> Outcome:
    """Train on this rank's part of every batch.

    Args:
        module: the network, alike on all ranks.
        data: to train on and to be judged by.
        method: how gradients are exchanged.
        course: length and rates.
        seed: of JointSpar's draws.
        log: file for a line of metrics a step; rank 0 writes it.
    """
    model = DistributedDataParallel(module)
    exchange = attach(method, model, course, seed)
    optimizer = lars(model, course, exchange if _divides_by_running(method) else None)
    with ExitStack() as stack:
        writing = log is not None and dist.get_rank() == 0
        file = stack.enter_context(log.open("w")) if log is not None and writing else None
        run = _Run(model, optimizer, data, course)
        for step in range(course.steps):
            if not run.step(step):
                break
            if file is not None:
                row = exchange.stats.row() if method.samples else {}
                file.write(json.dumps({**row, "step": step + 1, "loss": run.loss}) + "\n")
    stats = exchange.stats
    share = stats.total_bytes_sent / max(stats.total_dense_bytes_sent, 1)
    found = data.evaluate(model) if run.finite else (math.nan, math.nan)
    exchange.close()
    return run.outcome(found, share)


def attach(method: Method, model: DistributedDataParallel, course: Course, seed: int) -> Any:
    """Install a method; returns its handle."""
    if method.kind == "dense":
        return torchcomp.register(model, "mean", seed=seed)
    if method.kind == "topk":
        return torchcomp.register(model, topk_of_share(model, method.budget), seed=seed)
    return torchcomp.JointSpar(
        model,
        budget=method.budget,
        costs=method.costs,
        rule=None if method.kind == "uniform" else Baseline(course.alpha),
        compress=topk_of_share(model, INNER_SHARE) if method.kind == "jointspar+topk" else "mean",
        p_min=course.p_min,
        seed=seed,
    )


def lars(model: nn.Module, course: Course, sampled: Any = None) -> LARS:
    """LARS as the course wants it."""
    return LARS(
        model.parameters(),
        course.rate,
        momentum=course.momentum,
        weight_decay=course.weight_decay,
        trust_coefficient=course.trust,
        exclude_vectors=True,
        sampled=sampled,
    )


def topk_of_share(model: DistributedDataParallel, share: float) -> str:
    """TopK with error feedback that sends this share of dense DDP's bytes."""
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


class _Run:
    """The steps of one run, and the clocks on them."""

    def __init__(
        self, model: nn.Module, optimizer: LARS, data: TrainingData, course: Course
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._data, self._course = data, course
        self._device = next(model.parameters()).device
        self._steps: list[float] = []
        self._backwards: list[float] = []
        self.finite = True
        self.loss = math.nan

    def step(self, step: int) -> bool:
        """Take a step; returns whether all is still finite, on all ranks."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._course.rate_at(step)
        images, labels = (part.to(self._device) for part in self._data.batch(step))
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        loss = cross_entropy(self._model(images), labels)
        self.loss = float(loss.detach())
        computed = time.perf_counter()
        try:
            loss.backward()
        except torchcomp.NonFiniteError:
            self.finite = False
            return False
        self._backwards.append(time.perf_counter() - computed)
        self._optimizer.step()
        self._steps.append(time.perf_counter() - begin)
        return True

    def outcome(self, found: tuple[float, float], share: float) -> Outcome:
        """What the run came to."""
        step_ms, backward_ms = (
            1000 * statistics.median(times or [math.nan])
            for times in (self._steps, self._backwards)
        )
        return Outcome(*found, share, step_ms, backward_ms, sum(self._steps))


def _divides_by_running(method: Method) -> bool:
    return method.samples and method.norm == "running"
