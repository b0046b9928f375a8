"""EF: error feedback. What was not sent is added to the next gradient."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchcomp.aggregators.base import Aggregator
from torchcomp.aggregators.transfer import Transfer
from torchcomp.bucket import Bucket
from torchcomp.component import check_choice
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.memory import ErrorMemory

_MEMORY_DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class EF(Aggregator):
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
        exchange: "sum", "gather", or "auto" (sum where messages can be added).
        memory_dtype: "fp32", "fp64", "bf16" or "fp16"; by default fp32, or the gradient's dtype
            where that is wider. With a 16-bit memory the law above holds only to its rounding.
    """

    name: ClassVar[str] = "ef"
    example: ClassVar[str] = "ef(topk(0.01))"
    remembers: ClassVar[bool] = True

    memory_dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compressor.alpha(1) is None:
            raise SpecError(
                f"ef needs a contractive compressor, and {self.compressor} is not: its error can "
                "be larger than its input, so the memory would grow; leave out its scaling, or "
                f"use mean({self.compressor})",
                "compressor",
            )
        if self.memory_dtype is not None:
            check_choice(self, "memory_dtype", _MEMORY_DTYPES)

    def dtype_of_memory(self, gradient: torch.dtype) -> torch.dtype:
        """Dtype of the memory for gradients of a dtype."""
        if self.memory_dtype is not None:
            return _MEMORY_DTYPES[self.memory_dtype]
        return torch.promote_types(gradient, torch.float32)

    def memory_bytes(self, numel: int, dtype: torch.dtype) -> int:
        # Two copies: the memory before the step and the one after it, for roll-back.
        return 2 * numel * self.dtype_of_memory(dtype).itemsize

    def aggregate(self, bucket: Bucket, exchange: Exchange, memory: ErrorMemory, key: Key) -> None:
        g = bucket.flat
        e, x = memory.open(bucket, self.dtype_of_memory(g.dtype))
        torch.add(g, e, out=x)
        transfer = self.transfer(bucket, exchange, key)
        message = transfer.encode(g.copy_(x))
        transfer.subtract(message, x)
        _write_mean(transfer, message, g, x)


def _write_mean(
    transfer: Transfer, message: list[tuple[Tensor, ...]], g: Tensor, e: Tensor
) -> None:
    wide = torch.promote_types(g.dtype, e.dtype)
    if wide == g.dtype:
        transfer.mean(message, out=g)
        return
    mean = torch.empty_like(g, dtype=wide)
    transfer.mean(message, out=mean)
    g.copy_(mean)
    e.add_(mean.sub_(g))
