"""Time each method on one bucket: on the GPU, on the calling thread, launches and waits.

The bucket has the size of DDP's, 25 MiB. The other ranks exist only in name, see `ranks.py`: the
times are those of one rank of a group of that size, without the network.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.device import Device
from benchmarks.gpu.ranks import Echo
from torchcomp import Averager
from torchcomp.engine.bucket import Bucket

BUCKET = 25 * 2**20 // 4
"""Entries of DDP's bucket of 25 MiB."""

METHODS = (
    "mean",
    'ef(topk(0.01), exchange="allgather")',
    'ef(topk(0.01), exchange="sharded")',
    'bidirectional(topk(0.01), topk(0.01), selection="shard")',
    'bidirectional(topk(0.01), topk(0.01), selection="exact")',
    'ef(topk(0.01, values="int8"), exchange="allgather")',
    "ef(randk(0.01))",
    'ef(cast("bf16"))',
    'ef(quantize("int8"), exchange="allgather")',
    "powersgd(rank=1)",
    'ef21(topk(0.01), exchange="allgather")',
    'dgc(topk(0.01), exchange="allgather")',
)


class Steps:
    """One rank's steps with one bucket.

    `begin` ends the step before and begins another one. Then `average` averages the bucket.
    `step` does all of a step, with the gradients that `draw` made.
    """

    def __init__(self, spec: str, world_size: int, place: torch.device, n: int, seed: int) -> None:
        parameter = nn.Parameter(torch.empty(n // 1024, 1024, device=place))
        self.averager = Averager(
            spec, Echo(world_size, place), {"weight": parameter}, [("weight",)], seed=seed
        )
        shape = self.averager.shape_of(("weight",))
        self.bucket = Bucket(shape, torch.empty(n, device=place), lasts=True)
        self.generator = torch.Generator(place).manual_seed(seed)
        # The same values in every shard: then every rank owns equally many of the largest, which
        # `Echo` needs for selection="exact".
        self.shard = torch.empty(n // world_size, device=place)
        self.in_flight = False

    def draw(self) -> None:
        self.shard.normal_(generator=self.generator)
        self.bucket.flat.copy_(self.shard.repeat(self.bucket.flat.numel() // self.shard.numel()))

    def begin(self) -> None:
        if self.in_flight:
            self.finish()
        self.draw()
        self.averager.begin()
        self.in_flight = True

    def average(self) -> None:
        self.averager.average(self.bucket)

    def finish(self) -> None:
        self.averager.finish()
        self.in_flight = False

    def step(self) -> None:
        self.averager.begin()
        self.average()
        self.finish()

    def ready_to_finish(self) -> None:
        self.begin()
        self.average()
        self.in_flight = False


def measure(
    device: Device, spec: str, world_size: int, n: int, repeats: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield the row of one method on one bucket of `n` entries among `world_size` ranks."""
    steps = Steps(spec, world_size, device.place, n, seed)
    gpu_ms = device.milliseconds(steps.average, repeats, steps.begin)
    yield {
        "part": "method",
        "what": spec,
        "n": n,
        "ranks": world_size,
        "gpu_ms": f"{gpu_ms:.4f}",
        "cpu_us": f"{device.host_microseconds(steps.average, repeats, steps.begin):.0f}",
        "launches": device.launches(steps.average, steps.begin),
        "waits": device.waits(steps.average, steps.begin),
        "waits_per_step": device.waits(steps.finish, steps.ready_to_finish),
    }


def measure_host(
    device: Device, spec: str, world_size: int, n: int, repeats: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield the time that the calling thread takes for a whole step of one bucket, with its waits.

    The step is ``begin``, ``average`` and ``finish`` of the averager.
    """
    steps = Steps(spec, world_size, device.place, n, seed)
    for _ in range(3):  # compiles, and finds thresholds
        steps.draw()
        steps.step()
    microseconds = device.host_microseconds(steps.step, repeats, steps.draw)
    yield {
        "part": "host",
        "what": spec,
        "n": n,
        "ranks": world_size,
        "cpu_us": f"{microseconds:.0f}",
    }
