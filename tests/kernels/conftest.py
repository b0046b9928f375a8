"""Fixtures that the tests of several kernels share."""

from collections.abc import Iterator

import pytest

from torchcomp.kernels import backend


@pytest.fixture
def uncached_fast_forms() -> Iterator[None]:
    """Clear the cache of fast forms before and after a test that hides Numba."""
    backend.fast_form.cache_clear()
    yield
    backend._failed.clear()
    backend.fast_form.cache_clear()
