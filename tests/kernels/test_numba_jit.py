"""Kernels compile without a folder for Numba's cache."""

import errno

import pytest

from tests.support.logs import messages_of

caching = pytest.importorskip("numba.core.caching")


@pytest.fixture
def no_folder(monkeypatch):
    """Neither the folder of the package nor that of the user can be written."""

    # Permissions would not keep out a test that runs as root.
    def refuse(self):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(caching._CacheLocator, "ensure_cache_path", refuse)


def test_kernels_compile_uncached_and_say_so_once(no_folder, caplog):
    from torchcomp.kernels import numba_jit

    numba_jit._warn_once.cache_clear()
    doubled, tripled = (
        numba_jit.kernel()(function) for function in (lambda x: 2 * x, lambda x: 3 * x)
    )
    assert (doubled(21), tripled(14)) == (42, 42)
    (message,) = messages_of("kernels.numba_jit", caplog)
    assert "NUMBA_CACHE_DIR" in message
