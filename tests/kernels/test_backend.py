"""The choice between plain torch and the fast forms, and what happens when those fail."""

import builtins
import errno
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.kernels.forms import sparse_kernels
from tests.support.logs import messages_of
from tests.support.patience import PATIENCE
from tests.support.ranks import on_threads
from torchcomp.aggregators.rehearsal import rehearse
from torchcomp.kernels import backend
from torchcomp.kernels.sparse import Sparse

STEMS = "sparse", "select", "elias_fano", "quantize"


@pytest.fixture
def warned(caplog):
    """Return the warnings about kernels so far."""
    return partial(messages_of, "kernels.backend", caplog)


def use_two_kernels():
    assert sparse_kernels((0, 1000, 3)).select(torch.arange(1000.0)).tolist() == [997, 998, 999]
    index = torch.tensor([5, 40, 41, 120])
    ((_, code),) = sparse_kernels((0, 128, 4)).encode(torch.ones(128), index, None)
    assert bytes(code.tolist()) == bytes.fromhex("85 89 19 04")


@pytest.mark.usefixtures("uncached_fast_forms")
def test_without_numba_one_warning_says_how_to_install_it(monkeypatch, warned):
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in (*(f"{stem}_numba" for stem in STEMS), "numba_jit"):
        monkeypatch.delitem(sys.modules, f"torchcomp.kernels.{name}", raising=False)
    use_two_kernels()
    assert ['torchcomp-ddp[kernels]"' in message for message in warned()] == [True]


@pytest.mark.usefixtures("uncached_fast_forms")
@pytest.mark.parametrize("error", [AttributeError("print"), OSError("no LLVM"), ImportError("ABI")])
def test_any_error_of_the_import_ends_in_one_warning(monkeypatch, warned, error):
    def fail(name):
        raise error

    monkeypatch.setattr(backend.importlib, "import_module", fail)
    use_two_kernels()
    assert [str(error) in message for message in warned()] == [True]


@pytest.mark.usefixtures("uncached_fast_forms")
def test_a_kernel_that_fails_is_found_before_training(monkeypatch, warned):
    def fail(*arguments):
        raise TypeError("failed at nopython frontend")

    method, cpu = torchcomp.parse("ef(topk(0.01))"), torch.device("cpu")
    broken = SimpleNamespace(SparseNumba=fail)
    monkeypatch.setitem(sys.modules, "torchcomp.kernels.sparse_numba", broken)
    rehearse.cache_clear()
    rehearse(method, torch.float32, cpu)
    assert ["nopython frontend" in message for message in warned()] == [True]
    use_two_kernels()
    rehearse.cache_clear()


@pytest.mark.usefixtures("uncached_fast_forms")
def test_an_error_of_the_method_itself_is_raised(warned):
    class Broken(torchcomp.parse("mean").__class__):
        def aggregate(self, *arguments):
            raise KeyError("mine")

    form = backend.fast_form("select", "cpu")
    with pytest.raises(KeyError, match="mine"):
        rehearse(Broken(), torch.float32, torch.device("cpu"))
    # Its own error says nothing about the kernels of other methods.
    assert warned() == []
    assert backend.fast_form("select", "cpu") is form


def test_averages_of_bfloat16_weights_are_rehearsed_in_float32():
    def body():
        model = DistributedDataParallel(nn.Linear(40, 10).bfloat16())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rehearse.cache_clear()
        torchcomp.LocalSGD(model, optimizer, "every(2)", total_steps=4, compress="ef(topk(0.1))")
        return rehearse.cache_info().currsize

    assert on_threads(1, body) == [2], "bfloat16 and float32"


def test_a_large_k_is_rehearsed_as_well(monkeypatch):
    chosen, made = [], Sparse.__init__

    def record(self, vectors, fmt):
        chosen.extend(segment.k for segment in vectors.segments)
        made(self, vectors, fmt)

    monkeypatch.setattr(Sparse, "__init__", record)
    rehearse.cache_clear()
    rehearse(torchcomp.parse("ef(topk(k=1000))"), torch.float32, torch.device("cpu"))
    assert chosen == [1000]


# As many training scripts do to silence all ranks but one: a nested function, in a module `utils`.
REPLACED_PRINT = """
import builtins, logging, sys, types
import torch

utils = types.ModuleType("utils")
sys.modules["utils"] = utils
exec('''
def setup_for_distributed(is_master):
    import builtins
    builtin_print = builtins.print

    def print(*args, **kwargs):
        if is_master or kwargs.pop("force", False):
            builtin_print(*args, **kwargs)

    builtins.print = print
''', utils.__dict__)
utils.setup_for_distributed(False)
replaced = builtins.print
import torchcomp
logging.getLogger("torchcomp").addHandler(logging.StreamHandler(sys.stdout))

from torchcomp.kernels import backend
averager = torchcomp.Averager(
    'ef(topk(0.01, values="int8"))',
    torchcomp.InProcessExchange.alone(torch.device("cpu")),
    {"w": torch.zeros(10_000)},
)
assert builtins.print is replaced
assert "torchcomp.kernels.sparse_numba" in sys.modules  # before the first backward pass
averager.average_all({"w": torch.randn(10_000)})
assert backend.fast_form("sparse", "cpu") is not None
"""


@pytest.mark.thorough
def test_the_fast_forms_run_with_a_replaced_print():
    pytest.importorskip("numba", reason='needs pip install "torchcomp-ddp[kernels]"')
    command = [sys.executable, "-c", REPLACED_PRINT]
    done = subprocess.run(
        command, check=False, timeout=PATIENCE, env=os.environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert builtins.print is print


def test_kernels_compile_without_a_folder_for_the_cache_and_say_so_once(monkeypatch, caplog):
    caching = pytest.importorskip("numba.core.caching")
    from torchcomp.kernels import numba_jit

    # Permissions would not keep out a test that runs as root.
    def refuse(self):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(caching._CacheLocator, "ensure_cache_path", refuse)
    numba_jit._warn_once.cache_clear()
    doubled, tripled = (
        numba_jit.kernel()(function) for function in (lambda x: 2 * x, lambda x: 3 * x)
    )
    assert (doubled(21), tripled(14)) == (42, 42)
    (message,) = messages_of("kernels.numba_jit", caplog)
    assert "NUMBA_CACHE_DIR" in message
