"""What torchcomp needs of torch beyond its stable interface: what differs between versions.

torchcomp supports torch 2.6 and newer. tests/test_compat.py lists every private name of
torch that torchcomp uses, because any release can change these.
"""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# torch 2.13 renamed these collectives and deprecated their old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def skips_unused_parameters(model: DistributedDataParallel) -> bool:
    """Whether DDP hides unused parameters from the hook, an option that torch 2.6 does not have."""
    return bool(getattr(model, "skip_all_reduce_unused_params", False))


def listed_bucket_caps(model: DistributedDataParallel) -> tuple[int, ...]:
    """Return DDP's ``bucket_cap_mb_list`` in bytes. Without it, as in torch 2.6, this is empty."""
    return tuple(getattr(model, "bucket_bytes_cap_list", ()))
