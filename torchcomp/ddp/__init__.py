"""Binding to DistributedDataParallel. This package handles everything that is specific to DDP."""

# Import this early. DDP's constructor imports it, and if that happens after init_process_group,
# torch keeps the group alive forever. Its gloo threads then sometimes abort the process at exit,
# with plain DDP as well.
import torch._dynamo  # noqa: F401

from torchcomp.ddp.register import register_ddp

__all__ = ["register_ddp"]
