"""Compute: the step of a rank without any exchange, and when its gradients become ready."""

# DDP inspects the hook's signature, so this module must not postpone the evaluation of annotations.

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torchcomp.bucket import BucketShape, Group
from torchcomp.checks import check_count, check_positive, check_share
from torchcomp.errors import SpecError
from torchcomp.step_model.clock import worked


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
        """Return plain numbers, strings and lists, for JSON."""
        return {
            "buckets": [list(names) for names in self.buckets],
            "ready": list(self.ready),
            "backward": self.backward,
            "total": self.total,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Compute":
        """Return what :meth:`to_dict` was called on."""
        buckets = tuple(tuple(names) for names in values["buckets"])
        return cls(buckets, tuple(values["ready"]), values["backward"], values["total"])

    @classmethod
    def by_elements(
        cls,
        shapes: Sequence[BucketShape],
        seconds: float,
        *,
        forward: float = 0.3,
        optimizer: float = 0.04,
    ) -> "Compute":
        """Return a step whose buckets become ready by their share of the elements.

        Args:
            shapes: of DDP's buckets, in their order.
            seconds: of the whole step.
            forward: share of the step before the backward pass begins.
            optimizer: share of the step after the backward pass.

        Raises:
            SpecError: if `seconds` is not above 0, or the shares are invalid.
        """
        check_positive("seconds", seconds)
        check_share("forward", forward)
        check_share("optimizer", optimizer)
        start, stop = forward * seconds, max(forward, 1 - optimizer) * seconds
        total, done, ready = max(1, sum(shape.numel for shape in shapes)), 0, []
        for shape in shapes:
            done += shape.numel
            ready.append(min(stop, start + (stop - start) * done / total))
        return cls(tuple(shape.names for shape in shapes), tuple(ready), stop, seconds)


class ReadyTimes:
    """What a hook of DDP sees of a backward pass, if it exchanges nothing.

    Args:
        model: a DDP model without a hook. It gets one, and cannot train with others afterwards.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.names = {id(p): name for name, p in model.module.named_parameters()}
        self.device = next(model.parameters()).device
        self.seen: list[tuple[Group, float]] = []
        model.register_comm_hook(self, watch)

    def now(self) -> float:
        """Return the seconds of work so far."""
        return worked(self.device)


def watch(state: ReadyTimes, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Note when a bucket is ready. Every rank goes on with its own gradient."""
    names = tuple(state.names[id(parameter)] for parameter in bucket.parameters())
    state.seen.append((names, state.now()))
    flat = bucket.buffer()
    future: Any = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
    future.set_result(flat)
    return future  # type: ignore[no-any-return]


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
        model: a DDP model without a hook.
        forward: computes the loss of a batch.
        optimizer: of the model.
        steps: number of steps to measure.
        warm_up: number of steps before. DDP regroups its buckets after the first one.

    Raises:
        SpecError: if an argument is invalid.
    """
    check_count("steps", steps)
    check_count("warm_up", warm_up, least=2)
    seen = ReadyTimes(model)
    taken = [_step(seen, forward, optimizer) for _ in range(warm_up + steps)][warm_up:]
    buckets, rows = zip(*taken, strict=True)
    ready, backward, total = (
        _medians([row[0] for row in rows]),
        *(statistics.median(row[i] for row in rows) for i in (1, 2)),
    )
    return _ordered(buckets[-1], ready, backward, total)


def _step(
    seen: ReadyTimes, forward: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer
) -> tuple[tuple[Group, ...], tuple[list[float], float, float]]:
    seen.seen.clear()
    started = seen.now()
    optimizer.zero_grad()
    forward().backward()  # type: ignore[no-untyped-call]
    backward = seen.now() - started
    optimizer.step()
    total = seen.now() - started
    groups, times = zip(*seen.seen, strict=True)
    return groups, ([each - started for each in times], backward, total)


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _ordered(
    buckets: tuple[Group, ...], ready: Sequence[float], backward: float, total: float
) -> Compute:
    """Return the step. Medians of different steps can be out of order by a little."""
    bounded, latest = [], 0.0
    for each in ready:
        latest = max(latest, each)
        bounded.append(latest)
    backward = max(backward, latest)
    return Compute(buckets, tuple(bounded), backward, max(total, backward))
