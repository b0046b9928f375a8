"""close(): threads and connections of a handle end, although its model lives on."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.exchange.test_private import resources
from tests.support.cases import soak
from tests.support.ranks import on_processes


def registered_and_closed(options, times):
    """Descriptors and threads after one closed handle, and after more of them; all models live."""
    kept = []

    def once():
        model = DistributedDataParallel(nn.Linear(4, 2))
        handle = torchcomp.register(model, "ef(topk(0.5))", **options)
        model(torch.ones(1, 4)).sum().backward()
        handle.close()
        kept.append((model, handle))

    once()
    before = resources()
    for _ in range(times):
        once()
    torch.distributed.barrier()
    return before, resources()


@pytest.mark.parametrize("times", [5, *soak([500])])
@pytest.mark.parametrize("options", [{}, {"nodes": 2}])
def test_a_closed_handle_has_no_descriptors_or_threads(options, times):
    for before, after in on_processes(2, registered_and_closed, options, times):
        assert after <= before
