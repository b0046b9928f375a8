"""Pay-out: a method without a memory adds what another one's memory held to its gradients."""

import torch

from torchcomp.bucket import Bucket
from torchcomp.memory import ErrorMemory


def pay_out(bucket: Bucket, memory: ErrorMemory, world_size: int) -> None:
    """Add the memory to a bucket's gradients, and keep what they cannot take yet.

    A memory can exceed what a 16-bit gradient represents, or what the ranks' gradients may add up
    to. In each step as much is paid as keeps them within half of that range. Gradients themselves
    are never cut, whether large, infinite or NaN.

    Args:
        bucket: this rank's gradients; overwritten.
        memory: opened for the bucket; the caller commits it.
        world_size: number of ranks whose gradients are added up.
    """
    gradient = bucket.flat.to(torch.promote_types(bucket.flat.dtype, torch.float32))
    owed, rest = memory.open(bucket, gradient.dtype)
    share = torch.finfo(bucket.flat.dtype).max / (2 * world_size)
    bound = gradient.abs().clamp_(min=share)
    total = owed + gradient
    paid = total.clamp(-bound, bound)
    torch.sub(total, paid, out=rest)
    bucket.flat.copy_(paid)


def is_paid(memory: ErrorMemory) -> bool:
    """Whether nothing is owed any more; parts of parameters that no rank used wait for a use."""
    return not any(bool(part.any()) for _, part in memory.items())
