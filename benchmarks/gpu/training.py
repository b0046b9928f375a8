"""Time training steps of ResNet-50 and ViT-B/16: every method compared with plain DDP.

Mixed precision: bfloat16 activations by autocast, float32 parameters and gradients. SGD with
momentum. With one GPU there is no network, so the step shows what a method costs and not what it
saves.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.gpu.device import Device
from benchmarks.gpu.models import Task
from benchmarks.net.methods import Course, Trainee, attach
from benchmarks.net.names import BF16, FLOOR, PLAIN, POWERSGD
from torchcomp.engine.bucket import Bucket

METHODS = (
    FLOOR,
    PLAIN,
    BF16,
    "ef(topk(0.01))",
    "mean",
    'ef(topk(0.01), exchange="sharded")',
    'bidirectional(topk(0.01), topk(0.01), selection="shard")',
    'bidirectional(topk(0.01), topk(0.01), selection="exact")',
    'ef(cast("bf16"))',
    "powersgd(rank=1)",
    POWERSGD,
    'bidirectional(quantize("int8"), quantize("int8"))',
    'bidirectional(quantize("int4"), quantize("int4"))',
    'ef(topk(0.01, values="int8"))',
)


@dataclass
class Loop:
    """The training loop of one rank."""

    trainee: Trainee
    images: Tensor
    labels: Tensor

    def step(self) -> None:
        model, optimizer = self.trainee.model, self.trainee.optimizer
        optimizer.zero_grad()
        with torch.autocast(self.images.device.type, torch.bfloat16):
            loss = cross_entropy(model(self.images), self.labels)
        loss.backward()
        optimizer.step()


def begin(device: Device, task: Task, method: str, seed: int) -> Loop:
    """Build the model and its data on the device, and attach the method."""
    torch.manual_seed(seed)
    module = task.build().to(device.place)
    images = torch.randn(task.batch, 3, task.side, task.side, device=device.place)
    labels = torch.randint(task.classes, (task.batch,), device=device.place)
    trainee = attach(method, module, Course(lr=1e-3, total_steps=1))
    return Loop(trainee, images, labels)


def step_milliseconds(device: Device, step: Callable[[], None], seconds: float) -> list[float]:
    """Return the time of each step, for about `seconds` after a warm-up.

    The number of steps is the same on all ranks.
    """
    # DDP rebuilds its buckets in the second step, and kernels are compiled until then.
    for _ in range(3):
        step()
    device.wait()
    start = time.perf_counter()
    for _ in range(2):
        step()
    device.wait()
    each = torch.tensor([(time.perf_counter() - start) / 2], device=device.place)
    dist.all_reduce(each, dist.ReduceOp.MAX)
    marks = [device.mark()]
    for _ in range(max(5, min(200, int(seconds / each.item())))):
        step()
        marks.append(device.mark())
    device.wait()
    return [device.between(*pair) for pair in pairwise(marks)]


def exchange_milliseconds(device: Device, handle: Any, repeats: int) -> float:
    """Return the time that the exchange of a step takes on the device while nothing else runs.

    The averager takes real steps, with random gradients, in the groups of the DDP model.
    """
    averager = handle.averager
    gradients = {name: torch.randn_like(p) * 1e-3 for name, p in averager.parameters.items()}
    times = []
    for _ in range(repeats + 2):
        buckets = [Bucket.read(averager.shape_of(group), gradients) for group in averager.buckets]
        device.wait()
        averager.begin()
        start = device.mark()
        for bucket in buckets:
            averager.average(bucket)
        end = device.mark()
        averager.finish()
        device.wait()
        times.append(device.between(start, end))
    return statistics.median(times[2:])


def measure(
    device: Device, name: str, task: Task, seconds: float, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield one row for each method.

    Args:
        device: this rank's device. The default process group must exist.
        name: name of the model.
        task: the model and its images.
        seconds: time for the measured steps of each method.
        seed: seed of the weights and images.
    """
    parameters = sum(parameter.numel() for parameter in task.build().parameters())
    medians: dict[str, float] = {}
    for method in METHODS:
        loop = begin(device, task, method, seed)
        times = sorted(step_milliseconds(device, loop.step, seconds))
        medians[method] = statistics.median(times)
        row = {
            "part": "step",
            "model": name,
            "n": parameters,
            "what": method,
            "ranks": dist.get_world_size(),
            "steps": len(times),
            "step_ms": f"{medians[method]:.3f}",
            "step_ms_low": f"{times[len(times) // 4]:.3f}",
            "step_ms_high": f"{times[-1 - len(times) // 4]:.3f}",
        }
        if loop.trainee.counter is not None:
            alone = exchange_milliseconds(device, loop.trainee.counter, repeats=5)
            # What the step takes longer than one without an exchange is not hidden.
            shown = medians[method] - medians[FLOOR]
            row |= {"gpu_ms": f"{alone:.3f}", "hidden": f"{1 - shown / alone:.3f}"}
        yield row
        loop.trainee.close()
        dist.barrier()
        del loop
        if device.kind == "cuda":
            torch.cuda.empty_cache()
