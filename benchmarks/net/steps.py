"""Measure the time and bytes of a training step with one method, on one rank."""

import resource
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.net import counters, data, models
from benchmarks.net.job import Job
from benchmarks.net.methods import Course, Trainee, attached

_MOST_STEPS = 40
# Fewest and most steps of warm-up. After _WARM_UP_SECONDS, the fewest are enough.
_WARM_UP = (2, 5)
_WARM_UP_SECONDS = 20.0


@dataclass(frozen=True)
class RankSteps:
    """What one rank measured: times in seconds, bytes summed over all steps.

    `wire`, `payload`, `packets`, `tcp` and `inside` are those of the rank's host. `counted` and
    `counted_inside` are the rank's own.
    """

    times: list[float]
    user: float
    system: float
    wire: int
    payload: int
    packets: int
    tcp: int
    inside: int
    counted: int
    counted_inside: int


class StepBench:
    """Trains as a user's loop does, and measures each method."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.train, _ = data.digits(models.SIZES[job.model])

    def measure(self, method: str, levels: int) -> RankSteps:
        module = models.build(self.job.model, seed=0)
        course = Course(lr=0.01, total_steps=1000, settled=True)
        nodes = self.job.ranks if levels == 2 else None
        with attached(method, module, course, nodes) as trainee:
            return self._measure(trainee)

    def _measure(self, trainee: Trainee) -> RankSteps:
        steps = self._warm_up(trainee)
        dist.barrier()
        before = self._counters(trainee)
        # The ranks of a host share its counters: none may send before all have read them.
        dist.barrier()
        times = [self.step(trainee, number) for number in range(steps)]
        # The last messages of this rank can still be in its queue when its step has ended. After
        # the barrier they have been sent.
        dist.barrier()
        after = self._counters(trainee)
        dist.barrier()
        user, system, counted, inside, sent = (
            now - then for then, now in zip(before, after, strict=True)
        )
        return RankSteps(
            times=times,
            user=user,
            system=system,
            payload=sent.payload,
            counted=counted,
            counted_inside=inside,
            **asdict(sent),
        )

    def _warm_up(self, trainee: Trainee) -> int:
        """Train until step times are stable; return the number of steps to measure."""
        started = time.perf_counter()
        fewest, most = _WARM_UP
        for number in range(most):
            seconds = self.step(trainee, number)
            done = time.perf_counter() - started > _WARM_UP_SECONDS
            # Step times differ between ranks, but all ranks must take the same number of steps.
            if self.of_rank_0(float(done and number + 1 >= fewest)):
                break
        affordable = min(self.job.seconds / seconds, _MOST_STEPS)
        return int(self.of_rank_0(max(self.job.least, affordable)))

    def of_rank_0(self, value: float) -> float:
        """Rank 0's value, on every rank."""
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, src=0)
        return float(shared)

    def step(self, trainee: Trainee, number: int) -> float:
        """Take a step; return its seconds."""
        rows = data.shard(self.train, self.job.batch, self.rank, self.job.world, number, seed=0)
        images, labels = self.train.take(rows)
        started = time.perf_counter()
        trainee.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(trainee.model(images), labels)
        loss.backward()
        trainee.optimizer.step()
        return time.perf_counter() - started

    def _counters(self, trainee: Trainee) -> tuple[Any, ...]:
        """CPU seconds of this process, bytes by torchcomp's handle, and those of the kernel."""
        used, kernel = resource.getrusage(resource.RUSAGE_SELF), counters.Counters()
        if self.job.counted:
            kernel = counters.read(self.job.interface, self.job.port)
        return used.ru_utime, used.ru_stime, *trainee.counted(), kernel
