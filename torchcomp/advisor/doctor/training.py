"""Training: the same steps without an exchange, with plain DDP, and with the bf16 hook.

A communication hook on the user's DDP model switches between the three. The weights become wrong.
A step lasts from one last bucket to the next, with micro-batches, the optimizer and the loader.
"""

import argparse
import gc
import itertools
import math
import runpy
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchcomp.advisor.doctor.job import Job, NotMeasured
from torchcomp.advisor.moments import Moment, now, seconds
from torchcomp.advisor.named_models import build_named
from torchcomp.specs.errors import UnsupportedModelError

NO_EXCHANGE, PLAIN, BF16 = "no exchange", "DDP", "DDP, bf16 hook"
_HOOKS: dict[str, Callable[..., torch.futures.Future[torch.Tensor]]] = {
    NO_EXCHANGE: debugging_hooks.noop_hook,
    PLAIN: default_hooks.allreduce_hook,
    BF16: default_hooks.bf16_compress_hook,
}
MODES = tuple(_HOOKS)
WARM_UP = 3  # steps before the first one that counts: DDP rebuilds its buckets after the first
_ROUNDS = 3
_FIRST_STEPS, _MOST_STEPS = 3, 20  # of a mode, in the first and in later rounds
_MOST_ALONE = 100  # steps of an optimizer before there is a DDP model


class Finished(BaseException):
    """All phases are measured: the training loop ends here. No script catches it by accident."""


class Phases:
    """Which hook runs in which step, and how long the steps take, in about `budget` seconds."""

    def __init__(self, job: Job, budget: float, modes: Sequence[str] = MODES) -> None:
        self.job, self.budget, self.modes = job, budget, modes
        self.mode = PLAIN if PLAIN in modes else modes[0]  # of the next bucket
        # Shapes and dtypes of what the model that counts trains, by name.
        self.parameters: Mapping[str, torch.Tensor] = {}
        self.finished = False  # whether all is measured
        self._seconds: dict[str, list[float]] = {}
        self._moments: list[Moment] = []  # the last buckets of the steps
        self._agreements = itertools.count()
        # The models are not kept: one that outlives its process group can make gloo abort.
        self._attached: list[Mapping[str, torch.Tensor]] = []
        self._counts: int | None = None  # number of the model that counts
        self._steps = 0  # measured or not
        self._alone = 0  # steps of the optimizers before there is a model
        self._plan = self._planned()
        self._left = next(self._plan)

    def attach(self, model: DistributedDataParallel) -> None:
        """Measure the steps of a model: of several ones, the first that exchanges gradients."""
        state = self, len(self._attached), model.process_group
        trained = ((n, p) for n, p in model.module.named_parameters() if p.requires_grad)
        self._attached.append({n: torch.empty_like(p, device="meta") for n, p in trained})
        DistributedDataParallel.register_comm_hook(model, state, hook)
        model.register_forward_pre_hook(self._stop)

    def step(self, number: int) -> None:
        """Count a step of the model with this number, in its last bucket."""
        if self._counts is None:
            self._counts, self.parameters = number, self._attached[number]
        if self.finished or number != self._counts:
            return
        self._steps += 1
        self._moments.append(now(self.job.device))
        self._left -= 1
        if self._left == 0:
            taken = [seconds(*pair) for pair in itertools.pairwise(self._moments)]
            self._moments = self._moments[-1:]
            try:
                self._left = self._plan.send(taken)
            except StopIteration:
                self.finished = True

    def optimized(self, *_: Any) -> None:
        """Count a step of an optimizer, and end a script that makes no DDP model."""
        if not self._attached:
            self._alone += 1
            if self._alone == _MOST_ALONE:
                raise Finished

    def results(self) -> dict[str, list[float]]:
        """Return the seconds of the steps of each mode, or raise NotMeasured if one has none."""
        if not self._steps:
            raise NotMeasured(
                f"no model in DistributedDataParallel exchanged gradients, in {self._alone} steps "
                "of the optimizers: doctor measures a training loop with such a model"
            )
        missing = [mode for mode in self.modes if mode not in self._seconds]
        if missing:
            least = WARM_UP + len(self.modes) * (1 + _FIRST_STEPS) + (PLAIN in self.modes)
            raise NotMeasured(
                f"the training loop ended after {self._steps} steps with gradients, before "
                f"{missing[0]!r} could be measured: let it run for at least {least} steps"
            )
        return self._seconds

    def _planned(self) -> Generator[int, list[float], None]:
        """Yield how many steps to take next, and receive the seconds of each."""
        share = self.budget / _ROUNDS / len(self.modes)
        yield WARM_UP
        # Only now: a script can take longer to begin.
        began = time.monotonic()
        for most in (_FIRST_STEPS, *[_MOST_STEPS] * (_ROUNDS - 1)):
            for mode in self.modes:
                # A step contains the exchange of the last one before it. Without an exchange, fast
                # ranks run ahead: with one again, their first exchange waits for the others.
                settling = 2 if self.mode == NO_EXCHANGE != mode else 1
                self.mode = mode
                yield settling
                taken = yield 1
                more = self._agreed(min(most, int(share / max(taken[0], 1e-6))) - 1)
                if more > 0:
                    taken += yield more
                self._seconds.setdefault(mode, []).extend(taken)
            if self._agreed(int(time.monotonic() - began > self.budget)):
                return

    def _agreed(self, value: int) -> int:
        key = f"phases/{next(self._agreements)}"
        if self.job.rank == 0:
            self.job.store.set(key, str(value))
        return int(self.job.store.get(key))

    def _stop(self, *_: Any) -> None:
        if self.finished:
            raise Finished


def hook(state: tuple[Phases, int, Any], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange a bucket of a model, with its number and its ranks, as the current mode does."""
    (phases, number, group), last = state, bucket.is_last()
    exchanged = _HOOKS[phases.mode](group, bucket)
    if last:
        phases.step(number)
    return exchanged


_LAYER = 1_000_000  # parameters of a layer of the synthetic model
_MOST_LAYERS = 100
_IMAGE, _BATCH = (3, 224, 224), 8
_HOOK = ". doctor has a hook of its own: run the script without torchcomp or another hook"


def workload_of(options: argparse.Namespace) -> str:
    """Return in words what the options say to train."""
    if options.model:
        return f"{options.model}, batch {options.batch or _BATCH} per rank"
    if options.numel:
        return f"{options.numel:,} parameters, computing {options.step_ms:g} ms"
    return " ".join(options.script)


def train(options: argparse.Namespace, job: Job, phases: Phases) -> None:
    """Train what the options say, until all phases are measured."""
    if options.model:
        _train_named(options.model, options.batch or _BATCH, job, phases)
    elif options.numel:
        _train_synthetic(options.numel, options.step_ms / 1e3, job, phases)
    else:
        _run_script(options.script, phases)


def _train_named(name: str, batch: int, job: Job, phases: Phases) -> None:
    module = _materialized(build_named(name), job.device)
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


def _materialized(model: nn.Module, device: torch.device) -> nn.Module:
    """Give random values to the parameters of a model on the meta device, and move it."""
    values: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, shape in list(module.named_parameters(recurse=False)):
            if shape not in values:
                drawn = torch.empty(shape.shape, dtype=shape.dtype, device=device).normal_(std=0.02)
                values[shape] = nn.Parameter(drawn, shape.requires_grad)
            setattr(module, name, values[shape])
    return model.to(device)


def _train_synthetic(numel: int, seconds: float, job: Job, phases: Phases) -> None:
    model = _attached(_Synthetic(numel, seconds).to(job.device), job, phases)
    x = torch.zeros(1, device=job.device, requires_grad=True)
    with suppress(Finished):
        while True:
            model(x).sum().backward()
            model.zero_grad()


class _Synthetic(nn.Module):
    """A model that sleeps: a third of the time in its forward pass, the rest in its backward."""

    def __init__(self, numel: int, seconds: float) -> None:
        super().__init__()
        layers = min(_MOST_LAYERS, math.ceil(numel / _LAYER))
        sizes = [len(part) for part in torch.empty(numel, device="meta").tensor_split(layers)]
        self.weights = nn.ParameterList(torch.zeros(size) for size in sizes)
        self.seconds, self._began = seconds, 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds / 3)
        for number, weight in enumerate(self.weights):
            x = x + weight[0]
            x.register_hook(partial(self._compute, number))  # type: ignore[no-untyped-call]
        return x

    def _compute(self, number: int, gradient: Tensor) -> None:
        """Sleep until the backward pass reaches a layer; to make its gradient counts as well."""
        layers = len(self.weights)
        if number == layers - 1:
            self._began = time.perf_counter()
        end = self._began + 2 / 3 * self.seconds * (layers - number) / layers
        time.sleep(max(0.0, end - time.perf_counter()))


def _attached(module: nn.Module, job: Job, phases: Phases) -> DistributedDataParallel:
    devices = [job.device] if job.device.type == "cuda" else None
    model = DistributedDataParallel(module, device_ids=devices)
    phases.attach(model)
    return model


def _run_script(words: Sequence[str], phases: Phases) -> None:
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
    """Attach the phases to every DDP model and optimizer that a script makes in this block."""
    made, destroy = DistributedDataParallel.__init__, dist.destroy_process_group

    def init(model: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        made(model, *arguments, **options)
        phases.attach(model)

    def destroy_unless_finished(*arguments: Any, **options: Any) -> None:
        # In the script's `finally`, the exception still holds the model: gloo could hang.
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
