"""Workloads: what trains until the phases raise Finished in its next forward pass."""

import gc
import math
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchcomp.advisor.doctor.job import Job, NotMeasured
from torchcomp.advisor.doctor.phases import Finished, Phases
from torchcomp.advisor.named_models import build_named
from torchcomp.specs.errors import UnsupportedModelError

_LAYER = 1_000_000  # parameters of a layer of the synthetic model
_MOST_LAYERS = 100
_IMAGE = (3, 224, 224)
_HOOK = ". doctor has a hook of its own: run the script without torchcomp or another hook"


def train_named(name: str, batch: int, job: Job, phases: Phases) -> None:
    """Train a model of torchvision or timm on random images."""
    module = materialized(build_named(name), job.device)
    size = getattr(module, "default_cfg", {}).get("input_size", _IMAGE)  # of timm
    images = torch.randn(batch, *size, device=job.device)
    labels = torch.zeros(batch, dtype=torch.int64, device=job.device)
    model = _attached(module, job, phases)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    with suppress(Finished):
        while True:
            optimizer.zero_grad()
            scores = model(images)
            # Several scores of a model with auxiliary classifiers, such as GoogLeNet.
            every = scores if isinstance(scores, tuple) else (scores,)
            losses = [nn.functional.cross_entropy(each, labels) for each in every]
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def materialized(model: nn.Module, device: torch.device) -> nn.Module:
    """Give random values to the parameters of a model on the meta device, and move it."""
    values: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, shape in list(module.named_parameters(recurse=False)):
            if shape not in values:
                drawn = torch.empty(shape.shape, dtype=shape.dtype, device=device).normal_(std=0.02)
                values[shape] = nn.Parameter(drawn, shape.requires_grad)
            setattr(module, name, values[shape])
    return model.to(device)


def train_synthetic(numel: int, seconds: float, job: Job, phases: Phases) -> None:
    """Train a synthetic model."""
    model = _attached(Synthetic(numel, seconds).to(job.device), job, phases)
    x = torch.zeros(1, device=job.device, requires_grad=True)
    with suppress(Finished):
        while True:
            model(x).sum().backward()
            model.zero_grad()


class Synthetic(nn.Module):
    """A model that sleeps: a third of the time in its forward pass, the rest in its backward."""

    def __init__(self, numel: int, seconds: float) -> None:
        super().__init__()
        layers = min(_MOST_LAYERS, math.ceil(numel / _LAYER))
        sizes = [len(part) for part in torch.empty(numel, device="meta").tensor_split(layers)]
        self.weights = nn.ParameterList(torch.zeros(size) for size in sizes)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds / 3)
        each = 2 / 3 * self.seconds / len(self.weights)
        for weight in self.weights:
            x = _Layer.apply(x, weight, each)  # type: ignore[no-untyped-call]
        return x


class _Layer(torch.autograd.Function):
    """Passes its input on. Its backward pass takes some time, and gives a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.weight, ctx.seconds = weight, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        end = time.perf_counter() + ctx.seconds
        gradient = torch.zeros_like(ctx.weight)
        time.sleep(max(0.0, end - time.perf_counter()))
        return gradients[0], gradient, None


def _attached(module: nn.Module, job: Job, phases: Phases) -> DistributedDataParallel:
    devices = [job.device] if job.device.type == "cuda" else None
    model = DistributedDataParallel(module, device_ids=devices)
    phases.attach(model)
    return model


def run_script(words: Sequence[str], phases: Phases) -> None:
    """Run a script, or "-m" and a module, as torchrun would, until the phases are measured."""
    is_module = words[0] == "-m"
    name, *arguments = words[is_module:]
    before = sys.argv, sys.path[0]
    sys.argv = [name, *arguments]
    # With -m, the first folder is the current one, as for doctor itself.
    if not is_module:
        sys.path[0] = str(Path(name).resolve().parent)
    try:
        with _watched(phases):
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
    except Finished:
        pass
    except SystemExit as stop:
        # A script can catch Finished and end in its own way: all is measured then.
        if stop.code not in (None, 0) and not phases.finished:
            raise NotMeasured(f"{name} ended with exit status {stop.code}") from None
    except Exception as error:
        if not phases.finished:
            hint = _HOOK if isinstance(error, UnsupportedModelError) else ""
            raise NotMeasured(f"{name} raised {type(error).__name__}: {error}{hint}") from error
    finally:
        sys.argv, sys.path[0] = before
        # A DDP model that outlives its group can make gloo abort.
        gc.collect()


@contextmanager
def _watched(phases: Phases) -> Iterator[None]:
    """Attach the phases to every DDP model and every optimizer that a script makes in this block.

    Once they are measured, its process group is kept: the script's `finally` often ends it while
    the exception still holds the model, and gloo can hang if the group ends before the model.
    """
    made, destroy = DistributedDataParallel.__init__, dist.destroy_process_group

    def init(model: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        made(model, *arguments, **options)
        phases.attach(model)

    def destroy_unless_finished(*arguments: Any, **options: Any) -> None:
        if not phases.finished:
            destroy(*arguments, **options)

    handle = register_optimizer_step_post_hook(phases.optimized)
    try:
        with (
            patch.object(DistributedDataParallel, "__init__", init),
            patch.object(dist, "destroy_process_group", destroy_unless_finished),
        ):
            yield
    finally:
        handle.remove()
