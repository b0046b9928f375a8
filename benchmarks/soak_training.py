"""Train for many steps on four ranks, and sample what must stay flat or equal.

The law of conservation is checked on the parameters. With plain SGD at learning rate lr and this
rank's gradients g, let moved = -sum of lr * g. Then, with means over the ranks,

    parameters - first parameters = mean of moved - unsent

where the residual of compressed gradients is unsent in units of -lr.
"""

import gc
import hashlib
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.support.models import loss_of, mlp, rows
from tests.support.outcomes import flat, reloaded
from tests.support.ranks import on_processes

RANKS, STEPS, EVERY = 4, 20_000, 500
LR = 1e-3
# A swap takes this many steps until it is undone, more than a flush of the residual needs.
_SWAPPED = 10
# Bounds of a run that passes; see Verdict.
GROWTH_KIB, TREND, LOST = 2048.0, 64.0, 1e-9
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Method:
    """A method that trains a model.

    Attributes:
        source: the object that is saved and loaded.
        unit: what an element of the residual adds to the parameters when it is sent.
    """

    source: Any
    unit = -LR

    def begin(self, step: int) -> dict[str, float]:
        """Prepare a step. Return the factor of each parameter's gradient in `moved`."""
        raise NotImplementedError

    def replicas_are_equal(self) -> bool:
        """Whether all ranks have the same parameters now."""
        return True

    def swap(self, back: bool) -> bool:
        """Change to another method, or back. Return False if there is none."""
        return False


class Compressed(Method):
    """Compressed gradients, through :func:`torchcomp.register`."""

    def __init__(self, model: DistributedDataParallel, spec: str, **options: Any):
        self.source = torchcomp.register(model, spec, checksum=True, **options)
        self._specs = spec, "mean" if "nodes" in options else "ef(randk(0.2))"
        self._factors = {name: -LR for name, _ in model.module.named_parameters()}

    def begin(self, step: int) -> dict[str, float]:
        return self._factors

    def swap(self, back: bool) -> bool:
        self.source.swap(self._specs[not back])
        return True


class Local(Method):
    """Local steps with QSR, at a learning rate that falls to a tenth."""

    unit = 1.0

    def __init__(
        self, model: DistributedDataParallel, optimizer: Any, spec: str, steps: int, compress: str
    ):
        self.source = torchcomp.LocalSGD(
            model, optimizer, spec, total_steps=steps, compress=compress
        )
        self._steps, self._group = steps, optimizer.param_groups[0]
        self._names = [name for name, _ in model.module.named_parameters()]

    def begin(self, step: int) -> dict[str, float]:
        self._group["lr"] = LR * (0.55 + 0.45 * math.cos(math.pi * step / self._steps))
        return dict.fromkeys(self._names, -self._group["lr"])

    def replicas_are_equal(self) -> bool:
        return self.source.next_sync is None


class Sampled(Method):
    """JointSpar with a residual: each step keeps some layers, and divides them by p."""

    def __init__(self, model: DistributedDataParallel, spec: str):
        self.source = torchcomp.JointSpar(model, budget=0.5, compress=spec)

    def begin(self, step: int) -> dict[str, float]:
        p, kept = self.source.p, set(self.source.kept)
        return {
            name: -LR / p[layer] if layer in kept else 0.0
            for layer, names in self.source.layers.items()
            for name in names
        }


@dataclass(frozen=True)
class Family:
    """A way to train.

    Attributes:
        method: how a user writes it.
        make: from the model, its optimizer and the number of steps.
    """

    method: str
    make: Callable[[DistributedDataParallel, Any, int], Method]


def _compressed(spec: str, **options: Any) -> Family:
    more = "".join(f", {name}={value}" for name, value in options.items())
    return Family(
        f"register(model, '{spec}'{more})",
        lambda model, optimizer, steps: Compressed(model, spec, **options),
    )


def _local(compress: str) -> Family:
    spec = "qsr(alpha=0.002, h_base=4)"
    return Family(
        f"LocalSGD(..., '{spec}', compress='{compress}')",
        lambda model, optimizer, steps: Local(model, optimizer, spec, steps, compress),
    )


def _sampled(compress: str) -> Family:
    return Family(
        f"JointSpar(model, budget=0.5, compress='{compress}')",
        lambda model, optimizer, steps: Sampled(model, compress),
    )


TOPK = "ef(topk(0.1))"
FAMILIES = {
    "ef topk": _compressed(TOPK),
    "ef int8": _compressed('ef(quantize("int8"))'),
    "bidirectional exact": _compressed('bidirectional(topk(0.1), topk(0.1), selection="exact")'),
    "bidirectional shard": _compressed('bidirectional(topk(0.1), topk(0.1), selection="shard")'),
    "powersgd": _compressed("powersgd(rank=1)"),
    "local steps": _local("mean"),
    "local steps, compressed": _local(TOPK),
    "jointspar": _sampled(TOPK),
    "two levels": _compressed(TOPK, nodes=2),
}


@dataclass(frozen=True)
class Sample:
    """One rank after one step.

    Attributes:
        step: number of steps before it.
        resident: resident memory in bytes.
        descriptors: number of open file descriptors.
        threads: number of threads.
        digest: of the parameters.
    """

    step: int
    resident: int
    descriptors: int
    threads: int
    digest: str

    @classmethod
    def take(cls, step: int, module: nn.Module) -> "Sample":
        gc.collect()
        values = flat(module.parameters()).numpy().tobytes()
        return cls(
            step,
            int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE,
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            hashlib.sha256(values).hexdigest(),
        )


@dataclass(frozen=True)
class Rank:
    """The result of one rank: its samples, and the terms of the law by parameter."""

    samples: list[Sample]
    changed: dict[str, Tensor]  # parameters - first parameters
    moved: dict[str, Tensor]
    state: dict[str, Any]
    unit: float
    swaps: int
    loads: int
    seconds: float


def run(family: str, steps: int = STEPS, every: int = EVERY) -> list[Rank]:
    """Train on processes of this machine, over gloo. Return the results of all ranks.

    A sample is taken after every so many steps. TimeoutError after a tenth of a second per step.
    """
    return on_processes(RANKS, _train_alone, family, steps, every, timeout=60 + 0.1 * steps)


def _train_alone(family: str, steps: int, every: int) -> Rank:
    # Imported modules are not collected again and again: that would take most of the time.
    gc.freeze()
    return train(family, steps, every)


def train(family: str, steps: int, every: int) -> Rank:
    """Train on this rank. Events of each tenth sample: a swap, and a checkpoint that is loaded."""
    module = mlp()
    first = {name: p.detach().clone() for name, p in module.named_parameters()}
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    method = FAMILIES[family].make(model, optimizer, steps)
    moved = {name: torch.zeros_like(value) for name, value in first.items()}
    factors: dict[str, float] = {}
    for name, parameter in module.named_parameters():
        parameter.register_hook(partial(_note, moved[name], factors, name))
    samples: list[Sample] = []
    swaps, loads, started = 0, 0, time.perf_counter()
    for step in range(1, steps + 1):
        factors.update(method.begin(step - 1))
        optimizer.zero_grad()
        loss_of(model(rows(step)) - rows(-step)[:, :4]).backward()
        optimizer.step()
        # In the middle between two multiples of 10 * every, and first within the warm-up.
        after = (step - 5 * every) % (10 * every)
        if after == 0:
            method.source.load_state_dict(reloaded(method.source.state_dict()))
            loads += 1
        if after in (0, _SWAPPED):
            swaps += method.swap(back=after > 0)
        if step >= (len(samples) + 1) * every and method.replicas_are_equal():
            samples.append(Sample.take(step, module))
    return Rank(
        samples,
        {name: p.detach() - first[name] for name, p in module.named_parameters()},
        moved,
        method.source.state_dict(),
        method.unit,
        swaps,
        loads,
        time.perf_counter() - started,
    )


def _note(total: Tensor, factors: dict[str, float], name: str, gradient: Tensor | None) -> None:
    # JointSpar skips layers, whose gradient is then None.
    if gradient is not None:
        total.add_(gradient, alpha=factors[name])


# --- Verdict --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What the samples of all ranks say; of the ranks, the worst counts.

    The first quarter of the samples is warm-up, and is only compared for equal parameters.

    Attributes:
        resident_mib: resident memory of a rank after the warm-up.
        growth_kib: how much it has grown from then to the end: the difference between the medians
            of the first and the last fifth of these samples.
        trend: bytes per step in the last half of the run, by least squares.
        descriptors: how many more file descriptors are open at the end than after the warm-up.
        threads: the same for threads.
        equal: number of samples at which all ranks had the same parameters, bit for bit.
        lost: the largest difference between the two sides of the law of conservation, divided by
            the largest change of a parameter.
        unsent: the largest residual, in the same unit.
    """

    samples: int
    resident_mib: float
    growth_kib: float
    trend: float
    descriptors: int
    threads: int
    equal: int
    lost: float
    unsent: float

    @property
    def correct(self) -> bool:
        """Whether replicas were equal, and no gradient was lost."""
        return self.equal == self.samples > 0 and self.lost < LOST

    @property
    def passed(self) -> bool:
        """Whether the run was correct, and nothing has grown."""
        flat = self.growth_kib < GROWTH_KIB and self.trend < TREND
        return self.correct and flat and self.descriptors <= 0 and self.threads <= 0

    def columns(self) -> dict[str, str]:
        """The values as texts."""
        return {name: f"{value:.4g}" for name, value in vars(self).items()}

    @classmethod
    def of(cls, ranks: list[Rank]) -> "Verdict":
        samples = len(ranks[0].samples)
        after = [rank.samples[samples // 4 :] for rank in ranks]
        half = [rank.samples[samples // 2 :] for rank in ranks]
        lost, unsent = _law(ranks)
        return cls(
            samples,
            max(each[0].resident for each in after) / 2**20,
            max(_growth([s.resident for s in each]) for each in after) / 2**10,
            max(_slope([s.step for s in each], [s.resident for s in each]) for each in half),
            max(each[-1].descriptors - each[0].descriptors for each in after),
            max(each[-1].threads - each[0].threads for each in after),
            sum(
                len({sample.digest for sample in each}) == 1
                for each in zip(*[rank.samples for rank in ranks], strict=True)
            ),
            lost,
            unsent,
        )


def _growth(values: list[int]) -> float:
    fifth = max(1, len(values) // 5)
    return statistics.median(values[-fifth:]) - statistics.median(values[:fifth])


def _slope(x: list[int], y: list[int]) -> float:
    return statistics.linear_regression(x, y).slope


def _law(ranks: list[Rank]) -> tuple[float, float]:
    """Return the difference between both sides, and the unsent part, relative to the changes."""
    # For one rank, the residual is the mean over the ranks, and the server residual is whole.
    (whole,) = torchcomp.redistribute([rank.state for rank in ranks], 1)
    debts = [slot["tensors"] for slot in whole["slots"].values() if slot["kind"] == "debt"]
    first, largest, differences, rests = ranks[0], 0.0, [], []
    for name, changed in first.changed.items():
        moved = torch.stack([rank.moved[name] for rank in ranks]).mean(0)
        residuals = [debt[name].double().view_as(moved) for debt in debts if name in debt]
        unsent = first.unit * sum(residuals, torch.zeros_like(moved))
        largest = max(largest, float(moved.abs().max()))
        differences.append(float((changed + unsent - moved).abs().max()))
        rests.append(float(unsent.abs().max()))
    return max(differences) / largest, max(rests) / largest
