"""Other people's methods as DDP communication hooks, and the floor that none of them can beat."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

Future = torch.futures.Future[Tensor]


def no_op(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange nothing: every rank steps with its own gradient. The time of the arithmetic."""
    return _done(bucket.buffer())


class NaiveTopK:
    """TopK with error feedback as it is usually written: torch.topk, two all-gathers, no overlap.

    fp32 values and int32 indices, 8 bytes per entry. The residual goes by the bucket's index, which
    DDP's regrouping after the first step would mix up; the residual starts with the second.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.residual: dict[tuple[int, int], Tensor] = {}

    def exchange(self, bucket: dist.GradBucket) -> None:
        gradient = bucket.buffer()
        residual = self.residual.setdefault(
            (bucket.index(), gradient.numel()), torch.zeros_like(gradient)
        )
        residual.add_(gradient)
        count = max(1, round(self.ratio * gradient.numel()))
        indices = residual.abs().topk(count, sorted=False).indices
        values = residual[indices]
        residual[indices] = 0
        gradient.zero_()
        for theirs, places in zip(gathered(values), gathered(indices.int()), strict=True):
            gradient.index_add_(0, places, theirs)
        gradient.div_(dist.get_world_size())


def gathered(values: Tensor) -> list[Tensor]:
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, values)
    return everyone


def naive_topk(state: NaiveTopK, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Block in the hook; DDP calls it in the order of the buckets on every rank."""
    state.exchange(bucket)
    return _done(bucket.buffer())


def bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's own hook, under another name: DDP refuses its name beside gloo, which can do it."""
    return default_hooks.bf16_compress_hook(dist.group.WORLD, bucket)


def _done(value: Tensor) -> Future:
    future: Future = torch.futures.Future()
    future.set_result(value)
    return future
