"""Base of the aggregators that keep a residual: the part of the gradient that was not sent."""

from typing import Annotated

import torch

from torchcomp.aggregators.base import Aggregator, Law
from torchcomp.compressors import Compressor
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.state import Kind, Slot
from torchcomp.specs.component import Choices, Component
from torchcomp.specs.errors import SpecError

_DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
ResidualDtype = Annotated[str | None, Choices(_DTYPES)]


class Residual(Aggregator):
    """An aggregator with a residual, and an option for its dtype.

    Attributes:
        memory_dtype: dtype of the residual. The default is fp32, or the gradient's dtype if that is
            wider. A 16-bit residual loses only its own rounding error.
    """

    # Not a dataclass field here: subclasses declare it after their own options, so it comes last.
    memory_dtype: ResidualDtype

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, part in self._parts().items():
            if isinstance(part, Compressor):
                check_contractive(self, option)

    def residual_dtype(self, gradient: torch.dtype) -> torch.dtype:
        """The dtype of the residual, for gradients of dtype `gradient`."""
        if self.memory_dtype is None:
            return torch.promote_types(gradient, torch.float32)
        return _DTYPES[self.memory_dtype]

    def error_slot(self, shape: BucketShape) -> Slot:
        """The slot of this rank's residual, its unsent gradient."""
        return Slot("error", Kind.DEBT, shape.names, shape.sizes, self.residual_dtype(shape.dtype))

    def sum_dtype(self, gradient: torch.dtype) -> torch.dtype:
        """The dtype of the sum over the ranks, for gradients of dtype `gradient`."""
        return self.residual_dtype(gradient)

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        return (self.error_slot(shape),)

    def law(self, shape: BucketShape) -> Law:
        # Nothing is lost: what is not applied is in the residual.
        return Law(before={"error": -1.0}, after={"error": 1.0})

    def residual_shows_nonfinite(self, dtype: torch.dtype) -> bool:
        # A selecting compressor leaves NaN and infinities in place when it subtracts its message.
        # A wider residual gets those of other ranks too, when the mean is rounded to the gradients.
        if torch.promote_types(dtype, self.residual_dtype(dtype)) != dtype:
            return False
        first = next(iter(self._parts().values()), None)  # what a rank sends, or None
        return isinstance(first, Compressor) and first.selects


def check_contractive(owner: Component, field: str) -> None:
    """Raise SpecError unless the option `field` of `owner` is a contractive compressor."""
    compressor = getattr(owner, field)
    # Whether a compressor has an alpha does not depend on the length, so test length 1.
    if compressor.alpha(1) is None:
        raise SpecError(
            f"{owner.name} needs a contractive compressor, and {compressor} is not contractive: "
            "its error can be larger than its input, so the residual would grow. Leave out its "
            f"scaling, or use mean({compressor})",
            field,
        )
