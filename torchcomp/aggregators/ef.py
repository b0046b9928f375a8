"""EF: error feedback. What was not sent is added to the next gradient."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchcomp.aggregators.feedback import (
    check_contractive,
    check_memory_dtype,
    memory_dtype,
    traces,
    two_copies,
    write_mean,
)
from torchcomp.aggregators.one_way import OneWay
from torchcomp.bucket import Bucket
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.state import State


@dataclass(frozen=True)
class EF(OneWay):
    """``ef(C)``: error feedback around a contractive compressor C.

    With e the error memory of this rank (0 at the start) and g its gradient:

    1. x = g + e
    2. message = C(x)
    3. e <- x - message              (what was not sent stays)
    4. g <- mean of all messages     (plus: e takes up what rounding the mean to g's dtype loses)

    Nothing is lost: the sum of all applied means plus the mean memory equals the sum of all mean
    gradients, up to the rounding of the memory's dtype. The exception are 16-bit values that are
    summed on the way, by ``cast`` or of 16-bit gradients: every hop rounds, and no memory sees
    it; ``exchange="gather"`` conserves them, too.

    References: Seide et al., "1-bit SGD", Interspeech 2014; Karimireddy et al., "Error feedback
    fixes SignSGD", ICML 2019 (here the learning rate stays outside the memory, so that any
    optimizer may follow).

    Attributes:
        compressor: must be contractive.
        exchange: "sum", "gather", "sharded" or "auto" (see OneWay).
        memory_dtype: "fp32", "fp64", "bf16" or "fp16"; by default fp32, or the gradient's dtype
            where that is wider. With a 16-bit memory the law above holds only to its rounding.
    """

    name: ClassVar[str] = "ef"
    example: ClassVar[str] = "ef(topk(0.01))"
    remembers: ClassVar[bool] = True

    memory_dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_contractive(self, "compressor")
        check_memory_dtype(self)

    def memory_dtype_of(self, gradient: torch.dtype) -> torch.dtype:
        return memory_dtype(self.memory_dtype, gradient)

    def traces(self, dtype: torch.dtype) -> bool:
        return traces(self.compressor, dtype, self.memory_dtype_of(dtype))

    def memory_bytes(self, numel: int, dtype: torch.dtype, world_size: int) -> int:
        return two_copies(numel, self.memory_dtype_of(dtype))

    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        g = bucket.flat
        e, x = state.worker.open(bucket, self.memory_dtype_of(g.dtype))
        transfer = self.transfer(bucket, exchange, state, key)
        transfer.encode_sum(g, e, x)
        transfer.subtract(x)
        write_mean(transfer, g, x)
