"""Helpers with the idioms of timm.utils."""

import torch.distributed as dist


def is_primary(args):
    return args.rank == 0


def unwrap_model(model):
    return getattr(model, "module", model)


def distribute_bn(model, world_size):
    for name, buffer in unwrap_model(model).named_buffers():
        if "running_" in name:
            dist.all_reduce(buffer)
            buffer /= float(world_size)
