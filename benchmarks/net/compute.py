"""Compute: measure the step of a rank without any exchange, and when its gradients become ready."""

# DDP inspects the hook's signature, so this module must not postpone the evaluation of annotations.

import statistics
from collections.abc import Callable
from itertools import accumulate

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from torchcomp.advisor import Compute
from torchcomp.advisor.recording import worked
from torchcomp.engine.bucket import Group


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
        warm_up: number of steps before, at least 2. DDP regroups its buckets after the first one.
    """
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
