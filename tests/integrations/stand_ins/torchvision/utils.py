"""Helpers with the idioms of torchvision's references."""

import builtins
import os

import torch
import torch.distributed as dist


def setup_for_distributed(is_master):
    """Let only one rank print. A name in this module is not what ``print`` now refers to."""
    original = builtins.print

    def print(*args, **kwargs):
        if is_master or kwargs.pop("force", False):
            original(*args, **kwargs)

    builtins.print = print


def init_distributed_mode(args):
    args.rank, args.distributed = int(os.environ["RANK"]), True
    dist.init_process_group("gloo")
    setup_for_distributed(args.rank == 0)


def save_on_master(*args):
    if dist.get_rank() == 0:
        torch.save(*args)


def reduce_across_processes(value):
    total = torch.tensor(value)
    dist.barrier()
    dist.all_reduce(total)
    return total
