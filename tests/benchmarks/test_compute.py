"""When DDP's buckets are ready, in a step that exchanges nothing."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.net.compute import measure_compute
from tests.support.ranks import on_threads


def body():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 3))
    model = DistributedDataParallel(module, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 20) + dist.get_rank()
    compute = measure_compute(model, lambda: model(inputs).sum(), optimizer, steps=2)
    weights = [p.detach().clone() for p in module.parameters()]
    return compute, weights


def test_buckets_are_ready_in_the_order_of_the_backward_pass():
    (compute, weights), (_, others) = on_threads(2, body)
    names = [name for bucket in compute.buckets for name in bucket]
    assert len(compute.buckets) > 1
    assert sorted(names) == sorted(f"{i}.{p}" for i in (0, 2, 3) for p in ("bias", "weight"))
    assert "3.bias" in compute.buckets[0]
    assert "0.weight" in compute.buckets[-1]
    assert 0 < compute.ready[0] <= compute.ready[-1] <= compute.backward <= compute.total
    # Nothing was exchanged.
    assert not torch.equal(weights[0], others[0])
