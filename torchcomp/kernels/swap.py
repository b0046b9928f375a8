"""Swap or fill the values of tensors, if a flag on their device says so. The host does not wait."""

from typing import Any

import torch
from torch import Tensor

from torchcomp.kernels import backend


def swap_where(condition: Tensor, a: Tensor, b: Tensor) -> None:
    """Swap the values of `a` and `b` if `condition` is true."""
    # Runs once per slot and step on an accelerator. Triton's form returns at once if it is false.
    if triton := _form(a):
        triton.launch("swap", condition, a, b)
    else:
        before = a.clone()
        torch.where(condition, b, a, out=a)
        torch.where(condition, before, b, out=b)


def fill_where(condition: Tensor, x: Tensor, value: float) -> None:
    """Write `value` to all of `x` if `condition` is true; see :func:`swap_where`."""
    if triton := _form(x):
        triton.launch("fill", condition, x, value)
    else:
        x.masked_fill_(condition, value)


def _form(x: Tensor) -> Any:
    return None if x.is_cpu else backend.fast_form("swap", x.device.type)
