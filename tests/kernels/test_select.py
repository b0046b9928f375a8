"""Selection: every form gives the result of a plain sort, with any scratch."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.kernels.definitions import awkward, drift, sorted_out
from tests.kernels.forms import sparse_kernels, use_form
from tests.support.patience import PATIENCE
from tests.support.threads import torch_threads
from tests.support.vectors import normal
from torchcomp.kernels import backend, pool

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# One and several chunks, and lengths around the kernels' words of 64 and blocks of 2048.
SIZES = [1, 2, 63, 64, 65, 2049, 20_000, 140_003]


def largest(x, k):
    return sparse_kernels((0, x.numel(), k)).select(x)


@pytest.fixture(params=["torch", "numba", "device"])
def form(request, monkeypatch):
    """Run a test on each form. That for devices is plain torch with static shapes."""
    use_form("numba" if request.param == "numba" else "torch", "sparse", monkeypatch)
    if request.param == "device":
        monkeypatch.setattr("torchcomp.engine.host.can_read", lambda x: False)
    return request.param


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    """Make short vectors use several chunks and threads as well."""
    if backend.fast_form("sparse", "cpu"):
        monkeypatch.setattr("torchcomp.kernels.select_numba._INLINE", 1 << 17)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def ks(n):
    return sorted({k for k in (0, n // 100, n // 3, n - 1, n) if 0 <= k <= n})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, *SIZES])
def test_awkward_numbers(form, n, dtype):
    x = awkward(n, dtype)
    for k in ks(n):
        assert torch.equal(largest(x, k), sorted_out(x, k)), k


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, -0.0, -3.0, torch.nan, torch.inf])
@pytest.mark.parametrize("n", [5, 20_000, 140_003])
def test_among_equals_the_lowest_indices_win(form, n, value, dtype):
    x = torch.full((n,), value, dtype=dtype)
    assert torch.equal(largest(x, n // 3 + 1), torch.arange(n // 3 + 1))


@pytest.mark.parametrize("n", [1000, 20_000, 140_003])
def test_step_after_step(form, n):
    kernels = sparse_kernels((0, n, n // 100))
    for g, e, out in drift(n, 8):
        assert torch.equal(kernels.add_and_select(g, e, out), sorted_out(g + e, n // 100))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", ["zero", "median", "infinity"])
@pytest.mark.parametrize("sampled", [False, True])
def test_no_bound_changes_the_result(sampled, bound, dtype, monkeypatch):
    pytest.importorskip("numba")
    from torchcomp.kernels import select_numba

    x, kernels = normal(140_003, dtype=dtype), sparse_kernels((0, 140_003, 1400))
    word = select_numba._FORMATS[dtype][0]
    values = {"zero": 0.0, "median": float(x.double().abs().median()), "infinity": torch.inf}
    bits = torch.tensor(values[bound], dtype=dtype).view(word).item()
    if sampled:
        monkeypatch.setattr(
            select_numba, "_bound", lambda _, bits_of, *rest: bits_of.dtype.type(bits)
        )
    kernels.select(x)
    for threshold in (bits, None):
        kernels._candidates[0].threshold = threshold
        assert torch.equal(kernels.select(x), sorted_out(x, 1400))


# --- Pool -----------------------------------------------------------------------------------------


@pytest.fixture
def two_threads():
    with torch_threads(2):
        yield


def test_the_pool_uses_the_caller_and_another_thread(two_threads):
    met = threading.Barrier(2, timeout=PATIENCE)
    names = []
    pool.each(lambda number: (met.wait(), names.append(threading.current_thread())), 2)
    assert threading.current_thread() in names
    assert len(set(names)) == 2


def test_no_caller_waits_for_a_busy_pool(two_threads, monkeypatch):
    with ThreadPoolExecutor(1) as busy:
        done = threading.Event()
        busy.submit(done.wait)
        monkeypatch.setattr(pool, "_shared", lambda: busy)
        numbers = []
        try:
            pool.each(numbers.append, 10)
        finally:
            done.set()
    assert sorted(numbers) == list(range(10))


@pytest.mark.parametrize("failing", ["caller", "helper"])
def test_errors_of_any_thread_are_raised(two_threads, failing):
    met = threading.Barrier(2, timeout=PATIENCE)
    caller = threading.current_thread()

    def work(number):
        met.wait()
        if (threading.current_thread() is caller) == (failing == "caller"):
            raise KeyError(number)

    with pytest.raises(KeyError):
        pool.each(work, 2)


@pytest.mark.thorough
def test_a_forked_child_starts_its_own_threads():
    script = """
import os, torch
from torchcomp.kernels import pool
torch.set_num_threads(2)
numbers = []
pool.each(numbers.append, 100)
child = os.fork()
if not child:
    numbers = []
    pool.each(numbers.append, 100)
    os._exit(0 if sorted(numbers) == list(range(100)) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)
