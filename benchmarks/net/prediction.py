"""Measure what a prediction needs, and the step times to compare it with, on one rank.

What a prediction may read: the collectives on the link, the step without any exchange, the work of
each method, and a step in which a rank sends one value. It never reads the time of a step with any
other exchange.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import SGD

import torchcomp
from benchmarks.net import data, models
from benchmarks.net.compute import measure_compute
from benchmarks.net.job import Job
from benchmarks.net.methods import Course, Trainee, attached, in_ddp
from benchmarks.net.names import BASELINES, BF16, ONE_VALUE, PLAIN
from benchmarks.net.steps import StepBench
from torchcomp.advisor import (
    Compute,
    Recording,
    measure_collectives,
    record,
    record_all_reduce,
    record_average,
)
from torchcomp.advisor.collectives import ALL_REDUCE
from torchcomp.advisor.simulation import Call, Submitted
from torchcomp.engine.bucket import DEFAULT_CAPS, partition
from torchcomp.exchange import PrivateExchange, ProcessGroupExchange, new_name
from torchcomp.local_sgd.batchnorm import statistics_of, updated_layers
from torchcomp.local_sgd.schedules import Every

PROBES = (ONE_VALUE, "topk(k=1)")
"""A hook of PyTorch and one of ours that send one value of a bucket. What their steps take more
than predicted is the cost of the hook: of threads that hand over, and of ranks that wait for each
other."""

COLLECTIVES_SECONDS = 12.0
"""Time to measure the collectives of up to 8 ranks; that of more grows with them."""

_MOST_STEPS = 400
# Steps of a small model take few milliseconds, and have two usual lengths, because the ranks share
# cores. More of them take no time, and means over several have one usual length.
_SMALL, _MORE = 2_000_000, 5
_WARM_UP = 2
_BACKGROUND_SECONDS = 0.5


@dataclass(frozen=True)
class Outcome:
    """What one rank measured, as numbers for JSON."""

    values: dict[str, Any]


class PredictionBench:
    """Measures one link: first what predictions need, then every method of every model."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank
        self._everyone = ProcessGroupExchange()

    def measured(self) -> Iterator[tuple[dict[str, Any], Outcome]]:
        """Yield the measurements, each with its labels."""
        yield {"what": "link"}, Outcome(self._link())
        for model, methods in self._job.models:
            # In rounds, because a shared machine is slower at times.
            for number in range(self._job.rounds):
                labels = {"model": model, "rounds_left": self._job.rounds - 1 - number}
                yield from self._round(labels, methods)

    def _round(
        self, labels: dict[str, Any], methods: Iterable[str]
    ) -> Iterator[tuple[dict[str, Any], Outcome]]:
        """Yield the computation of a model, and then of each method its work and its steps."""
        model = labels["model"]
        compute, gradients, work = self._compute(model)
        yield {"what": "compute", **labels}, Outcome(work)
        for method in (*PROBES, *methods):
            own = {**labels, "method": method, "levels": 1}
            recorded = self._record(model, method, compute, gradients)
            yield {"what": "recording", **own}, Outcome(recorded)
            what = "probe" if method in PROBES else "step"
            yield {"what": what, **own}, Outcome(self._step(model, method))

    def _link(self) -> dict[str, Any]:
        """The collectives of all ranks."""
        world = self._job.world
        # Closed at once: idle threads of gloo would take time from what follows.
        exchange = PrivateExchange(new_name(self._everyone), [*range(world)], self._everyone)
        # All hosts share the cores of this machine, with the switch between them.
        measured = measure_collectives(
            exchange, seconds=collectives_seconds(world), stopwatch=share_of(world)
        )
        dist.barrier()
        exchange.close()
        return measured.to_dict()

    def _compute(self, name: str) -> tuple[Compute, dict[str, torch.Tensor], dict[str, Any]]:
        """The step without any exchange, and gradients to record with."""
        model = in_ddp(models.build(name, seed=0))
        optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        images, labels = data.digits(models.SIZES[name])[0].take(torch.arange(self._job.batch))
        dist.barrier()
        usage = Usage()
        compute = measure_compute(
            model,
            lambda: torch.nn.functional.cross_entropy(model(images), labels),
            optimizer,
            steps=(self._job.least + 5) * more_of(model.module),
        )
        used = usage.since()
        gradients = {
            name: p.grad.clone()
            for name, p in model.module.named_parameters()
            if p.grad is not None
        }
        dist.barrier()
        return compute, gradients, {"compute": asdict(compute), **used}

    def _record(
        self,
        name: str,
        method: str,
        compute: Compute,
        gradients: Mapping[str, torch.Tensor],
    ) -> dict[str, Any]:
        module = models.build(name, seed=0)
        parameters, steps = dict(module.named_parameters()), 4 * more_of(module)
        dist.barrier()  # all ranks work at the same time, as in a step
        if method == ONE_VALUE:
            call = Call(ALL_REDUCE, 4)
            submitted = tuple(Submitted(names, (call,)) for names in compute.buckets)
            return asdict(Recording(method, submitted))
        if method in (PLAIN, BF16):
            dtype = torch.bfloat16 if method == BF16 else None
            recorded = record_all_reduce(
                parameters, buckets=compute.buckets, dtype=dtype, steps=steps
            )
            return asdict(recorded)
        if isinstance(torchcomp.parse(method), Every):
            statistics = statistics_of(updated_layers(module))
            recorded = record_average(
                parameters, self._job.world, statistics=statistics, steps=steps
            )
            return asdict(recorded)
        recorded = record(
            method,
            parameters,
            self._job.world,
            buckets=compute.buckets,
            groups=partition(parameters.items(), DEFAULT_CAPS),
            gradients=gradients,
            steps=steps,
        )
        return asdict(recorded)

    def _step(self, name: str, method: str) -> dict[str, Any]:
        """The mean seconds of a step with the method, over each round."""
        job = replace(self._job, model=name)
        bench = StepBench(job, self._rank)
        course = Course(lr=0.01, total_steps=1000, settled=True)
        module = models.build(name, seed=0)
        period = period_of(method)
        length = period if period > 1 else more_of(module)
        with attached(method, module, course) as trainee:
            return self._rounds(bench, trainee, length)

    def _rounds(self, bench: StepBench, trainee: Trainee, length: int) -> dict[str, Any]:
        """Measure rounds of `length` steps."""

        def one_round() -> float:
            return sum(bench.step(trainee, number) for number in range(length)) / length

        # DDP regroups its buckets after the first step.
        for _ in range(_WARM_UP // length + 1):
            seconds = one_round()
        affordable = self._job.seconds / (seconds * length)
        rounds = int(bench.of_rank_0(max(self._job.least, min(affordable, _MOST_STEPS / length))))
        dist.barrier()
        usage = Usage()
        times = [one_round() for _ in range(rounds)]
        dist.barrier()
        return {"times": times, "length": length, **usage.since()}


class Usage:
    """The processor time of the whole machine and of this process, from now on."""

    def __init__(self) -> None:
        self._before = self._read()

    def since(self) -> dict[str, float]:
        """Return seconds: on the clock, of all cores that were busy, and of this process."""
        passed = [now - before for now, before in zip(self._read(), self._before, strict=True)]
        return dict(zip(("wall", "busy", "worked"), passed, strict=True))

    @staticmethod
    def _read() -> tuple[float, float, float]:
        ticks = [
            int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        ]
        idle = ticks[3] + ticks[4]  # the fourth and fifth: idle, and waiting for a disk
        busy = (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, time.process_time()


def share_of(ranks: int) -> Callable[[], Callable[[], float]]:
    """Return a stopwatch of the core that a rank uses: its share of what the whole host uses.

    All ranks call this at the same time. Other programs must be idle, or equally busy all the time.
    """
    dist.barrier()  # all ranks are idle from here on
    idle = Usage()
    time.sleep(_BACKGROUND_SECONDS)
    others = idle.since()
    dist.barrier()

    def stopwatch() -> Callable[[], float]:
        usage = Usage()

        def used() -> float:
            found = usage.since()
            background = others["busy"] / others["wall"] * found["wall"]
            # Its share of a busy host is not known well, but it is at least its own.
            return max(found["worked"], (found["busy"] - background) / ranks)

        return used

    return stopwatch


def collectives_seconds(world: int) -> float:
    """Return the time to measure the collectives of a group, with `world` ranks on the machine."""
    return COLLECTIVES_SECONDS * max(1.0, world / 8)


def more_of(module: torch.nn.Module) -> int:
    """Return how many times as many steps of a model are measured as of a large one."""
    return _MORE if sum(each.numel() for each in module.parameters()) < _SMALL else 1


def has_our_hook(method: str) -> bool:
    """Whether a method is a gradient method of torchcomp: no baseline, and no schedule."""
    return method not in BASELINES and period_of(method) == 1


def period_of(method: str) -> int:
    """The steps from one average to the next: of ``every(n)``, n; of a gradient method, 1."""
    if method in BASELINES:
        return 1
    parsed = torchcomp.parse(method)
    return parsed.h if isinstance(parsed, Every) else 1
