"""Phases: the same training steps without an exchange, with plain DDP, and with the bf16 hook.

A communication hook on the user's DDP model switches between the three, so that whatever trains,
also a user's script, is measured as it is. The weights become wrong: they are thrown away.

A step lasts from one last bucket to the next. It includes the micro-batches of an accumulated
gradient, the optimizer and the loader.
"""

import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.nn.parallel import DistributedDataParallel

from torchcomp.advisor.doctor.job import Job, NotMeasured

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
        self._marks: list[Any] = []
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
        self._marks.append(_mark(self.job.device))
        self._left -= 1
        if self._left == 0:
            seconds = _differences(self._marks, self.job.device)
            self._marks = self._marks[-1:]
            try:
                self._left = self._plan.send(seconds)
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
                seconds = yield 1
                more = self._agreed(min(most, int(share / max(seconds[0], 1e-6))) - 1)
                if more > 0:
                    seconds += yield more
                self._seconds.setdefault(mode, []).extend(seconds)
            if self._agreed(int(time.monotonic() - began > self.budget)):
                return

    def _agreed(self, value: int) -> int:
        """Return the value of rank 0, which says how many steps to take."""
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


def _mark(device: torch.device) -> Any:
    """Return a point in time, on a GPU one of its stream: the host runs ahead of it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _differences(marks: list[Any], device: torch.device) -> list[float]:
    """Return the seconds between points in time."""
    pairs = itertools.pairwise(marks)
    if device.type != "cuda":
        return [after - before for before, after in pairs]
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in pairs]
