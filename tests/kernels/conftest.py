"""What the tests of several kernels share."""

from collections.abc import Iterator

import pytest

from torchcomp.kernels import backend


@pytest.fixture
def forms_looked_for_anew() -> Iterator[None]:
    """For a test that hides Numba: what was found before it, or in it, is not remembered."""
    backend.fast_form.cache_clear()
    yield
    backend.fast_form.cache_clear()
