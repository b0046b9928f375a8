"""Choose between the forms of a kernel for the CPU."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from torchcomp.kernels import backend, quantize
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


def quantize_form(device: torch.device | str = "cpu") -> ModuleType:
    """Return the module that encodes and decodes values in the form that is in use."""
    return backend.host_form("quantize", torch.empty(0, device=device)) or quantize


def vectors(
    *segments: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    frames: object = None,
) -> SimpleNamespace:
    """What kernels know of segments (start, n, k)."""
    made = tuple(Segment(*segment) for segment in segments)
    place = {"device": torch.device(device), "dtype": dtype, "frames": frames}
    return SimpleNamespace(segments=made, **place)


def sparse_kernels(
    *segments: tuple[int, int, int], fmt: str | None = None, **options: Any
) -> Sparse:
    """Return the kernels of segments (start, n, k), in the form that is in use."""
    return kernels_for(vectors(*segments, **options), fmt)
