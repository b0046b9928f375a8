"""Triton's kernels on tensors of the CPU, with small blocks: the interpreter is slow."""

import contextlib
from unittest import mock

from torchcomp.kernels import backend, elementwise_triton
from torchcomp.kernels.table_triton import SIZES

SMALL = {"block": 512, "count": 256, "chunk": 128, "group": 2, "fill": 128}
SMALL |= {"bit": 32, "decode": 128, "tile": 512, "part": 256}


@contextlib.contextmanager
def small_blocks():
    """Make short vectors use several blocks."""
    with (
        mock.patch.dict(SIZES, SMALL),
        mock.patch.object(elementwise_triton, "_BLOCK", 128),
    ):
        yield


@contextlib.contextmanager
def triton_on_the_cpu():
    """Choose Triton's kernels, as on CUDA."""
    backend.fast_form.cache_clear()
    with (
        mock.patch.dict(backend._LIBRARY, cpu="triton"),
        mock.patch("torchcomp.engine.host.can_read", return_value=False),
    ):
        forms = [backend.fast_form(stem, "cpu") for stem in ("sparse", "elementwise", "counted")]
        assert all(form.__name__.endswith("_triton") for form in forms)
        yield
        # A kernel that failed would have been replaced by plain torch.
        assert "cpu" not in backend._failed
    backend.fast_form.cache_clear()
