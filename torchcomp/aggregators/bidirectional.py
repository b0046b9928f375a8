"""Bidirectional: compressed on the way to the owners of shards, and on the way back."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchcomp.aggregators.base import Aggregator, Shape
from torchcomp.aggregators.feedback import (
    check_contractive,
    check_memory_dtype,
    memory_dtype,
    traces,
    two_copies,
    write_mean,
)
from torchcomp.aggregators.sharded import Plan, ShardedTransfer, plan, sharded_load
from torchcomp.bucket import Bucket
from torchcomp.checks import check_choice
from torchcomp.codec import codec
from torchcomp.component import check_kind
from torchcomp.compressors import Compressor
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.state import State
from torchcomp.traffic import Load


@dataclass(frozen=True)
class Bidirectional(Aggregator):
    """``bidirectional(C, D)``: error feedback on both ways, so traffic does not grow with ranks.

    With e the memory of this rank as a worker and d its memory as the owner of a shard (both 0 at
    the start), g its gradient and W the number of ranks:

    worker
      1. x = g + e
      2. message = C(x); each owner gets the entries of its shard
      3. e <- x - message
    owner
      4. s = sum of all ranks' messages / W + d
      5. answer = D(s)
      6. d <- s - answer
    everybody
      7. g <- the answers of all owners

    Nothing is lost: the sum of all applied means plus the mean of e plus d equals the sum of all
    mean gradients, up to the rounding of the memory's dtype.

    Reference: Zou, "Bidirectional TopK sparsification for distributed learning", University of
    Waterloo, 2022 (arXiv 2209.15203). There the server is one machine and the learning rate is
    inside the memories; with a constant rate that is the same method.

    Attributes:
        up: C, contractive. ``identity`` compresses the answers only.
        down: D, contractive. ``identity`` is ``ef(C)`` by another route.
        selection: what topk selects from. "exact": from the whole bucket, as one server would;
            owners agree on a threshold first, from a guess, which is the last step's threshold.
            The first step has none, and may send several times the bytes that
            :func:`torchcomp.explain` plans for a step. "shard": every shard by itself, with a fixed
            number of entries (``k=5`` are 5 of each shard), so nothing has to be agreed.
        memory_dtype: "fp32", "fp64", "bf16" or "fp16"; by default fp32, or the gradient's dtype
            where that is wider. With a 16-bit memory the law above holds only to its rounding.
    """

    name: ClassVar[str] = "bidirectional"
    positional: ClassVar[int] = 2
    example: ClassVar[str] = "bidirectional(topk(0.01), topk(0.01))"
    remembers: ClassVar[bool] = True
    owes: ClassVar[bool] = True

    up: Compressor
    down: Compressor
    selection: str = "exact"
    memory_dtype: str | None = None

    def __post_init__(self) -> None:
        for way in ("up", "down"):
            check_kind(self, way, Compressor)
            check_contractive(self, way)
        check_choice("selection", self.selection, ("exact", "shard"), owner=self.name)
        check_memory_dtype(self)
        for way in ("up", "down"):
            self._check_divisible(way)

    def _check_divisible(self, way: str) -> None:
        compressor: Compressor = getattr(self, way)
        if self.selection == "exact" and not (compressor.selects or compressor.elementwise):
            raise SpecError(
                f"{compressor.name} works on whole vectors, and the parts of a bucket lie on "
                'several ranks: with selection="shard" it works on every shard by itself',
                way,
            )

    @property
    def whole_model(self) -> bool:
        return self.up.whole_model or self.down.whole_model

    def route(self, shape: Shape, world_size: int) -> str:
        return "sharded"

    def message_bytes(self, shape: Shape) -> int:
        return codec(self.up, *shape).nbytes

    def load(self, shape: Shape, world_size: int, rank: int) -> Load:
        return sharded_load(*self._plans(shape, world_size), rank)

    def traces(self, dtype: torch.dtype) -> bool:
        return traces(self.up, dtype, memory_dtype(self.memory_dtype, dtype))

    def memory_bytes(self, numel: int, dtype: torch.dtype, world_size: int) -> int:
        memory = memory_dtype(self.memory_dtype, dtype)
        return two_copies(numel, memory) + two_copies(-(-numel // world_size), memory)

    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        g = bucket.flat
        dtype = memory_dtype(self.memory_dtype, g.dtype)
        e, x = state.worker.open(bucket, dtype)
        up, down = self._plans((bucket.names, bucket.sizes, g.dtype), exchange.world_size)
        transfer = ShardedTransfer(up, down, exchange, key, state, dtype, remembers=True)
        transfer.encode_sum(g, e, x)
        transfer.subtract(x)
        write_mean(transfer, g, x)

    def _plans(self, shape: Shape, world_size: int) -> tuple[Plan, Plan]:
        return (
            plan("up", self.up, self.selection, *shape, world_size),
            plan("down", self.down, self.selection, *shape, world_size),
        )
