"""Launches of a bucket with Triton's kernels, which are counted while they are interpreted."""

import contextlib
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

from tests.kernels.interpreted.test_steps import triton_on_the_cpu
from tests.support.cases import only, some
from tests.support.launches import Count, launches, one_bucket
from torchcomp import host

BUDGETS = {
    'ef(topk(0.01), exchange="allgather")': lambda ranks: 24 + ranks,
    "bidirectional(topk(0.01), topk(0.01))": lambda ranks: 50 + 2 * ranks,
}


class _Operations(TorchDispatchMode):
    """Counts the operations of torch, as if they were on a device."""

    def __init__(self, count):
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if launches(func, name, result):
            self._count.launch(name)
        return result


@contextlib.contextmanager
def counted():
    """Count operations of torch, kernels of Triton, and copies to a device."""
    count = Count()
    run, copy_to = interpreter.GridExecutor.__call__, host.copy_to

    def kernel(self, *args, **options):
        count.launch(self.fn.__name__)
        with _disable_current_modes():
            return run(self, *args, **options)

    def copy(values, device):
        count.launch("copy_to")
        return copy_to(values, device)

    with (
        triton_on_the_cpu(),
        mock.patch.object(interpreter.GridExecutor, "__call__", kernel),
        mock.patch("torchcomp.host.copy_to", copy),
        _Operations(count),
    ):
        yield count


@pytest.mark.parametrize("ranks", only([8, 64], now=[8]))
@pytest.mark.parametrize("spec", some(BUDGETS, of=2))
def test_a_bucket_costs_at_most_its_budget(spec, ranks):
    cpu = torch.device("cpu")
    per_bucket, _ = one_bucket(spec, ranks, simulation=counted, device=cpu)
    assert per_bucket.launches <= BUDGETS[spec](ranks), per_bucket
