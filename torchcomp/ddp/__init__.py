"""Binding to DistributedDataParallel. Every quirk of DDP is handled in this package."""

from torchcomp.ddp.handle import Handle
from torchcomp.ddp.register import register

__all__ = ["Handle", "register"]
