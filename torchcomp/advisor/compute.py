"""Compute: the step of a rank without any exchange, and when its gradients become ready."""

# DDP inspects the hook's signature, so this module must not postpone the evaluation of annotations.

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from torchcomp.engine.bucket import BucketShape, Group
from torchcomp.specs.checks import check_count, check_positive
from torchcomp.specs.errors import SpecError

_FORWARD, _OPTIMIZER = 0.3, 0.04  # shares of a step that is not measured in parts


@dataclass(frozen=True)
class Compute:
    """The work of a step without any exchange, in seconds of this rank's thread or device.

    Attributes:
        buckets: names of the parameters in each of DDP's buckets, in the order in which they
            become ready.
        ready: when each bucket is ready, in seconds of work since the step began; ascending.
        backward: when the backward pass ends.
        total: when the step ends.
    """

    buckets: tuple[Group, ...]
    ready: tuple[float, ...]
    backward: float
    total: float

    def __post_init__(self) -> None:
        check_positive("total", self.total)
        times = [0.0, *self.ready, self.backward, self.total]
        if len(self.ready) != len(self.buckets) or times != sorted(times):
            raise SpecError(
                f"a step needs a ready time for each of its {len(self.buckets)} buckets, ascending "
                f"and at most backward <= total, not {times[1:]}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and sequences, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Compute":
        """Return what :meth:`to_dict` was called on."""
        buckets = tuple(tuple(names) for names in values["buckets"])
        return cls(buckets, tuple(values["ready"]), values["backward"], values["total"])

    @classmethod
    def by_elements(cls, shapes: Sequence[BucketShape], seconds: float) -> "Compute":
        """Return a step whose buckets become ready by their share of the elements.

        Args:
            shapes: of DDP's buckets, in their order.
            seconds: of the whole step, of which 30 % are the forward pass and 4 % the optimizer.

        Raises:
            SpecError: if `seconds` is not above 0.
        """
        check_positive("seconds", seconds)
        start, stop = _FORWARD * seconds, (1 - _OPTIMIZER) * seconds
        total = max(1, sum(shape.numel for shape in shapes))
        done = accumulate(shape.numel for shape in shapes)
        ready = tuple(min(stop, start + (stop - start) * each / total) for each in done)
        return cls(tuple(shape.names for shape in shapes), ready, stop, seconds)


def worked(device: torch.device) -> float:
    """Return the seconds that this thread has worked, or the time at which the device is idle.

    On the CPU, the time on the clock would show the work of the other ranks of the host.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.thread_time()


class _Ready:
    """What a hook of DDP sees of a backward pass, if it exchanges nothing."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.names = {id(p): name for name, p in model.module.named_parameters()}
        self.device = next(model.parameters()).device
        self.seen: list[tuple[Group, float]] = []


def watch(state: _Ready, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Note when a bucket is ready. Every rank goes on with its own gradient."""
    names = tuple(state.names[id(parameter)] for parameter in bucket.parameters())
    state.seen.append((names, worked(state.device)))
    return noop_hook(None, bucket)


def measure_compute(
    model: DistributedDataParallel,
    forward: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 5,
    warm_up: int = 2,
) -> Compute:
    """Measure a training step without any exchange. The weights of the ranks then differ.

    Ranks that share cores must call this at the same time.

    Args:
        model: a DDP model without a hook. It gets one, and cannot train with others afterwards.
        forward: computes the loss of a batch.
        optimizer: of the model.
        steps: number of steps to measure.
        warm_up: number of steps before. DDP regroups its buckets after the first one.

    Raises:
        SpecError: if an argument is invalid.
    """
    check_count("steps", steps)
    check_count("warm_up", warm_up, least=2)
    state = _Ready(model)
    model.register_comm_hook(state, watch)
    rows = []
    for step in range(warm_up + steps):
        state.seen.clear()
        started = worked(state.device)
        optimizer.zero_grad()
        forward().backward()  # type: ignore[no-untyped-call]
        backward = worked(state.device)
        optimizer.step()
        if step >= warm_up:
            ready = [when for _, when in state.seen]
            rows.append([t - started for t in (*ready, backward, worked(state.device))])
    buckets = tuple(names for names, _ in state.seen)
    # Medians of different steps can be out of order by a little.
    medians = accumulate(map(statistics.median, zip(*rows, strict=True)), max)
    *ready, backward, total = medians
    return Compute(buckets, tuple(ready), backward, total)
