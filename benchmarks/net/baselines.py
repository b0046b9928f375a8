"""The methods that torchcomp is compared with, as DDP communication hooks."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

Future = torch.futures.Future[Tensor]


def no_op(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange nothing: every rank steps with its own gradient.

    The step then takes the time of the arithmetic alone, which no method can beat.
    """
    return _done(bucket.buffer())


def one_value(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the first value of each bucket only: what is left are the costs of the hook."""
    gradient = bucket.buffer()
    reduced = dist.all_reduce(gradient[:1], async_op=True).get_future()
    return reduced.then(lambda _: gradient)


class NaiveTopK:
    """TopK with error feedback as it is usually written: torch.topk, two all-gathers, no overlap.

    An entry takes 8 bytes: an fp32 value and an int32 index.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.residual: dict[tuple[int, int], Tensor] = {}

    def exchange(self, bucket: dist.GradBucket) -> None:
        gradient = bucket.buffer()
        # DDP regroups its buckets after the first step, so an index can then name another bucket.
        # With the length in the key, a bucket whose length has changed starts without a residual.
        residual = self.residual.setdefault(
            (bucket.index(), gradient.numel()), torch.zeros_like(gradient)
        )
        residual.add_(gradient)
        count = max(1, round(self.ratio * gradient.numel()))
        indices = residual.abs().topk(count, sorted=False).indices
        values = residual[indices]
        residual[indices] = 0
        gradient.zero_()
        # Every rank adds in rank order, so all replicas stay equal bit for bit.
        all_values, all_indices = gathered(values), gathered(indices.int())
        for rank_values, rank_indices in zip(all_values, all_indices, strict=True):
            gradient.index_add_(0, rank_indices, rank_values)
        gradient.div_(dist.get_world_size())


def gathered(values: Tensor) -> list[Tensor]:
    """The values of all ranks, by an all-gather."""
    of_all = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, values)
    return of_all


def naive_topk(state: NaiveTopK, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange the bucket with blocking collectives inside the hook."""
    # DDP calls the hook in the same bucket order on every rank, so the collectives match.
    state.exchange(bucket)
    return _done(bucket.buffer())


def bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's own hook, under another name."""
    # DDP refuses this hook by name with gloo, although gloo can all-reduce bf16.
    return default_hooks.bf16_compress_hook(dist.group.WORLD, bucket)


def _done(value: Tensor) -> Future:
    # A future must be told of the GPU of its result, and refuses to be told of the CPU.
    future: Future = torch.futures.Future(devices=[value.device] if value.is_cuda else [])
    future.set_result(value)
    return future
