"""One rank of a job: `python -m benchmarks.net.worker RANK JOB`, run by launch.py."""

import faulthandler
import gc
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from itertools import product, repeat
from typing import Any

from benchmarks.net.job import Job


def main() -> None:
    rank, job = int(sys.argv[1]), Job.from_json(sys.argv[2])
    pin(rank, job.world)
    # Import torch after pinning, so that its threads inherit the cores, and torchcomp before the
    # process group is made (docs/assumptions.md).
    import torch
    import torch.distributed as dist

    import torchcomp  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{job.address}:{job.port}",
        rank=rank,
        world_size=job.world,
        timeout=timedelta(seconds=job.timeout),
    )
    # A worker without a result for this long prints its stack and exits.
    faulthandler.dump_traceback_later(job.timeout, exit=True)
    for labels, outcome in measured(job, rank):
        faulthandler.dump_traceback_later(job.timeout, exit=True)
        outcomes: list[Any] = [None] * job.world
        dist.all_gather_object(outcomes, asdict(outcome))
        if rank == 0:
            model = labels.get("model", job.model)
            result = {**labels, "parameters": parameters(model), "ranks": outcomes}
            print(json.dumps(result), flush=True)
    # Free the last DDP model before the process group is destroyed (docs/assumptions.md).
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def pin(rank: int, world: int) -> None:
    """Pin this rank to its own cores. With more ranks than cores, ranks share single cores."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // world)
    first = rank * share % len(cores)
    os.sched_setaffinity(0, cores[first : first + share])


def parameters(model: str) -> int:
    from benchmarks.net.models import build

    return sum(parameter.numel() for parameter in build(model, seed=0).parameters())


def measured(job: Job, rank: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield every measurement of the job, with the labels that identify it."""
    if job.task == "prediction":
        from benchmarks.net.prediction import PredictionBench

        yield from PredictionBench(job, rank).measured()
    elif job.task == "accuracy":
        from benchmarks.net.accuracy import AccuracyBench

        trainer = AccuracyBench(job, rank)
        for method, rate, seed in product(job.methods, job.rates, job.seeds):
            labels = {"method": method, "rate": rate, "seed": seed}
            yield labels, trainer.measure(method, seed, rate)
    else:
        from benchmarks.net.steps import StepBench

        bench = StepBench(job, rank)
        for round_index in range(job.rounds):
            for method, levels in zip(job.methods, job.levels or repeat(1), strict=False):
                labels = {"method": method, "levels": levels, "round": round_index}
                yield labels, bench.measure(method, levels)


if __name__ == "__main__":
    main()
