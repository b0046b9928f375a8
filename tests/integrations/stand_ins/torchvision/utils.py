"""Helpers with the idioms of torchvision's references."""

import builtins
import os

import torch
import torch.distributed as dist


def init_distributed_mode(args):
    """Join the group; let only one rank print, by a `print` that takes force=."""
    args.rank, args.distributed = int(os.environ["RANK"]), True
    dist.init_process_group("gloo")
    original = builtins.print

    def print(*words, force=False, **options):
        if args.rank == 0 or force:
            original(*words, **options)

    builtins.print = print


def save_on_master(*args):
    if dist.get_rank() == 0:
        torch.save(*args)


def reduce_across_processes(value):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total
