"""Binding to DistributedDataParallel. This package handles everything that is specific to DDP."""

# Import this before init_process_group: otherwise DDP's constructor does, torch keeps the group
# alive, and its gloo threads sometimes abort the process at exit, with plain DDP as well.
import torch._dynamo  # noqa: F401

from torchcomp.ddp.register import register_ddp

__all__ = ["register_ddp"]
