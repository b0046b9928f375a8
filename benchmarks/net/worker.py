"""One rank of a job: `python -m net.worker RANK JOB`, started by launch.py on every host."""

import faulthandler
import gc
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from net.job import Job


def main() -> None:
    rank, job = int(sys.argv[1]), Job.from_json(sys.argv[2])
    pin(rank, job.world)
    # Imported late, so that every thread of theirs is pinned. The clock goes before torchcomp, and
    # torchcomp before the process group (docs/assumptions.md).
    import torch
    import torch.distributed as dist

    from net.collectives import CollectiveClock

    clock = CollectiveClock()
    clock.install()
    import torchcomp  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{job.address}:{job.port}",
        rank=rank,
        world_size=job.world,
        timeout=timedelta(seconds=job.timeout),
    )
    # A worker that is left alone ends by itself, and says where it hung.
    faulthandler.dump_traceback_later(job.timeout, exit=True)
    for labels, outcome in measured(job, rank, clock):
        faulthandler.dump_traceback_later(job.timeout, exit=True)
        everyone: list[Any] = [None] * job.world
        dist.all_gather_object(everyone, asdict(outcome))
        if rank == 0:
            result = {**labels, "parameters": parameters(job.model), "ranks": everyone}
            print(json.dumps(result), flush=True)
    # What the last measurement held goes before the process group (docs/assumptions.md).
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def pin(rank: int, world: int) -> None:
    """Give every rank cores of its own, or share them out one by one if they do not suffice."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // world)
    first = rank * share % len(cores)
    os.sched_setaffinity(0, cores[first : first + share])


def parameters(model: str) -> int:
    from net.models import build

    return sum(parameter.numel() for parameter in build(model, seed=0).parameters())


def measured(job: Job, rank: int, clock: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Every measurement of the job, with what tells it from the others."""
    if job.task == "accuracy":
        from net.accuracy import AccuracyBench

        trainer = AccuracyBench(job, rank)
        for method in job.methods:
            for rate in job.rates:
                for seed in job.seeds:
                    labels = {"method": method, "rate": rate, "seed": seed}
                    yield labels, trainer.measure(method, seed, rate)
        return
    from net.steps import StepBench

    bench = StepBench(job, rank, clock)
    for turn in range(job.rounds):
        for method in job.methods:
            yield {"method": method, "round": turn}, bench.measure(method)


if __name__ == "__main__":
    main()
