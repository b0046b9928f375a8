"""Choose between the forms of a kernel for the CPU."""

import pytest

from torchcomp.kernels import backend
from torchcomp.kernels.backend import fast_form


def use_form(form: str, stem: str, patch: pytest.MonkeyPatch) -> None:
    """Run the kernel `stem` in its "torch" or its "numba" form until `patch` is undone."""
    if form == "numba":
        pytest.importorskip("numba", reason='needs pip install "torchcomp-ddp[kernels]"')
        # A fixture of the test may have hidden the fast forms.
        patch.setattr(backend, "fast_form", fast_form)
        assert fast_form(stem, "cpu") is not None
    else:
        patch.setattr(backend, "fast_form", lambda stem, device: None)
