"""Let auto choose, then time its candidates one after another, on one rank."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from benchmarks.net import models
from benchmarks.net.collectives import CollectiveClock
from benchmarks.net.job import Job
from benchmarks.net.methods import Course, Trainee, attach
from benchmarks.net.prediction import Outcome, Usage
from benchmarks.net.steps import StepBench

_WARM_UP = 3


class AutoBench:
    """Trains every model with auto."""

    def __init__(self, job: Job, rank: int, clock: CollectiveClock) -> None:
        self._job, self._rank, self._clock = job, rank, clock

    def measured(self) -> Iterator[tuple[dict[str, Any], Outcome]]:
        """Yield, for each model, the choice and then the steps of each candidate."""
        for model, _ in self._job.models:
            bench = StepBench(replace(self._job, model=model), self._rank, self._clock)
            course = Course(lr=0.01, total_steps=1000)
            trainee = attach("auto", models.build(model, seed=0), course)
            number = 0
            while trainee.counter.choice is None:
                bench.step(trainee, number)
                number += 1
            choice = trainee.counter.choice
            labels = {"model": model, "chosen": choice.method, "trial_steps": number}
            for method, seconds in choice.seconds.items():
                # The residual of the last method is sent in the first step of the warm-up.
                trainee.counter.swap(method)
                values = {"trial": seconds, **self._alone(bench, trainee)}
                yield {**labels, "method": method}, Outcome(values)
            trainee.close()
            # Objects in reference cycles would otherwise keep this model in memory.
            del trainee
            gc.collect()

    def _alone(self, bench: StepBench, trainee: Trainee) -> dict[str, Any]:
        for number in range(_WARM_UP):
            seconds = bench.step(trainee, number)
        steps = int(bench.of_rank_0(max(self._job.least, self._job.seconds / seconds)))
        dist.barrier()
        usage = Usage()
        times = [bench.step(trainee, number) for number in range(steps)]
        dist.barrier()
        return {"times": times, **usage.since()}
