"""Kernels compile without a folder for Numba's cache."""

import errno
import subprocess
import sys
import textwrap

import pytest

from tests.support.logs import messages_of
from tests.support.patience import PATIENCE

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


SCRIPT = """
    from unittest import mock
    import torch
    import torch.distributed as dist
    import torchcomp

    where = "numba.core.caching._CacheLocator.ensure_cache_path"
    mock.patch(where, side_effect=OSError(30, "Read-only file system")).start()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parameters, exchange = {"p": torch.zeros(5000)}, torchcomp.ProcessGroupExchange()
    averager = torchcomp.Averager("ef(topk(0.01))", exchange, parameters)
    gradient = torch.arange(5000.0)
    averager.average_all({"p": gradient})
    print(int((gradient != 0).sum()))
"""


@pytest.mark.soak
def test_a_step_runs_uncached():
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["50"]
    assert run.stderr.count("NUMBA_CACHE_DIR") == 1
