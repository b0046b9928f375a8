"""What all aggregators share that keep a residual: the part of the gradient that was not sent."""

import torch
from torch import Tensor

from torchcomp.aggregators.base import Aggregator
from torchcomp.bucket import BucketShape
from torchcomp.checks import check_choice
from torchcomp.component import Component
from torchcomp.compressors import Compressor
from torchcomp.errors import SpecError
from torchcomp.kernels.cast import narrow
from torchcomp.routes import Route
from torchcomp.state import Kind, Slot

_DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Residual(Aggregator):
    """An aggregator with the option of the residual's dtype, which is its last one.

    Attributes:
        memory_dtype: "fp32", "fp64", "bf16" or "fp16"; by default fp32, or the gradient's dtype
            where that is wider. With a 16-bit residual nothing is lost but its rounding.
    """

    memory_dtype: str | None

    def __post_init__(self) -> None:
        if self.memory_dtype is not None:
            check_choice("memory_dtype", self.memory_dtype, _DTYPES, owner=self.name)

    def residual_dtype(self, gradient: torch.dtype) -> torch.dtype:
        """Dtype of the residual, for gradients of a dtype."""
        if self.memory_dtype is None:
            return torch.promote_types(gradient, torch.float32)
        return _DTYPES[self.memory_dtype]

    def error_slot(self, shape: BucketShape) -> Slot:
        """What this rank has not sent of its own gradients."""
        return Slot("error", Kind.DEBT, shape.names, shape.sizes, self.residual_dtype(shape.dtype))

    def shows(self, compressor: Compressor, gradient: torch.dtype) -> bool:
        """See :meth:`Aggregator.traces`: what selects takes out nothing that is not finite."""
        wide = torch.promote_types(gradient, self.residual_dtype(gradient))
        return compressor.selects and wide == gradient


def check_contractive(owner: Component, field: str) -> None:
    """Require that an option is a contractive compressor.

    Raises:
        SpecError: with the reason.
    """
    compressor = getattr(owner, field)
    if compressor.alpha(1) is None:
        raise SpecError(
            f"{owner.name} needs a contractive compressor, and {compressor} is not: its error can "
            "be larger than its input, so the residual would grow; leave out its scaling, or use "
            f"mean({compressor})",
            field,
        )


def write_mean(route: Route, g: Tensor, e: Tensor) -> None:
    """Write the mean to `g`; `e` takes up what rounding it to the dtype of `g` loses."""
    wide = torch.promote_types(g.dtype, e.dtype)
    if wide == g.dtype:
        route.mean(g)
        return
    mean = torch.empty_like(g, dtype=wide)
    route.mean(mean)
    narrow(mean, g.dtype, g)
    e.add_(mean.sub_(g))
