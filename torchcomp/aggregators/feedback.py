"""What all aggregators with error feedback share."""

import torch
from torch import Tensor

from torchcomp.aggregators.transfer import Transfer, narrow_into
from torchcomp.checks import check_choice
from torchcomp.component import Component
from torchcomp.compressors import Compressor
from torchcomp.errors import SpecError

_DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def check_contractive(owner: Component, field: str) -> None:
    """Require that an option is a contractive compressor.

    Raises:
        SpecError: with the reason.
    """
    compressor = getattr(owner, field)
    if compressor.alpha(1) is None:
        raise SpecError(
            f"{owner.name} needs a contractive compressor, and {compressor} is not: its error can "
            "be larger than its input, so the memory would grow; leave out its scaling, or "
            f"use mean({compressor})",
            field,
        )


def check_memory_dtype(owner: Component) -> None:
    """Require that the option ``memory_dtype`` is None or a known dtype.

    Raises:
        SpecError: naming the known ones.
    """
    name = getattr(owner, "memory_dtype", None)
    if name is not None:
        check_choice("memory_dtype", name, _DTYPES, owner=owner.name)


def memory_dtype(name: str | None, gradient: torch.dtype) -> torch.dtype:
    """Dtype of the memory for gradients of a dtype; by default float32 or wider."""
    return torch.promote_types(gradient, torch.float32) if name is None else _DTYPES[name]


def two_copies(numel: int, dtype: torch.dtype) -> int:
    """Bytes of a memory: as it was before the step, and after it, for roll-back."""
    return 2 * numel * dtype.itemsize


def traces(compressor: Compressor, gradient: torch.dtype, memory: torch.dtype) -> bool:
    """See :meth:`Aggregator.traces`: what selects takes out nothing that is not finite."""
    return compressor.selects and torch.promote_types(gradient, memory) == gradient


def write_mean(transfer: Transfer, g: Tensor, e: Tensor) -> None:
    """Write the mean to `g`; `e` takes up what rounding it to the dtype of `g` loses."""
    wide = torch.promote_types(g.dtype, e.dtype)
    if wide == g.dtype:
        transfer.mean(out=g)
        return
    mean = torch.empty_like(g, dtype=wide)
    transfer.mean(out=mean)
    narrow_into(g, mean)
    e.add_(mean.sub_(g))
