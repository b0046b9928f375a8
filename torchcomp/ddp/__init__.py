"""Binding to DistributedDataParallel. Every quirk of DDP is handled in this package."""

# DDP's constructor imports this module. Where that happens after init_process_group, torch keeps
# the group for ever, and its gloo threads now and then abort the process at exit (plain DDP, too).
import torch._dynamo  # noqa: F401

from torchcomp.ddp.handle import Handle
from torchcomp.ddp.register import register

__all__ = ["Handle", "register"]
