"""Choose between the forms of a kernel for the CPU."""

from dataclasses import dataclass

import pytest
import torch

from torchcomp.kernels import backend
from torchcomp.kernels.backend import fast_form
from torchcomp.kernels.segments import Segment
from torchcomp.kernels.sparse import Sparse, kernels_for


def use_form(form: str, stem: str, patch: pytest.MonkeyPatch) -> None:
    """Run the kernel `stem` in its "torch" or its "numba" form until `patch` is undone."""
    if form == "numba":
        pytest.importorskip("numba", reason='needs pip install "torchcomp-ddp[kernels]"')
        # A fixture of the test may have hidden the fast forms.
        patch.setattr(backend, "fast_form", fast_form)
        assert fast_form(stem, "cpu") is not None
    else:
        patch.setattr(backend, "fast_form", lambda stem, device: None)


@dataclass
class Prepared:
    """What kernels know of vectors."""

    segments: tuple[Segment, ...]
    device: torch.device
    dtype: torch.dtype
    fields: None = None
    frames: None = None


def sparse_kernels(
    *segments: tuple[int, int, int],
    fmt: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Sparse:
    """Return the kernels of segments (start, n, k), in the form that is in use."""
    made = tuple(Segment(*segment) for segment in segments)
    return kernels_for(Prepared(made, torch.device(device), dtype), fmt)
