"""Transport: collectives of torchcomp beside those of DDP and the user, and where they run."""

import torch
import torch.distributed as dist

from torchcomp.ddp.executors import Executor, InlineExecutor, StreamExecutor, ThreadExecutor
from torchcomp.exchange import Exchange


def transport(group: dist.ProcessGroup | None, device: torch.device) -> tuple[Exchange, Executor]:
    """An exchange among the ranks of `group`, and what runs it; all of the ranks call this."""
    if device.type == "cuda":
        return Exchange(group, device), StreamExecutor(device)
    # Not get_backend, because a group that was made without naming a backend has several.
    if "cpu:gloo" not in dist.get_backend_config(group):
        return Exchange(group, device), InlineExecutor()
    # A group of its own, because DDP and the user issue collectives from another thread.
    ranks = dist.get_process_group_ranks(group)
    private = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return Exchange(private, device), ThreadExecutor()
