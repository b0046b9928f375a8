"""Routes: all of them compute the same mean, and the choice of a route is cached."""

import pytest
import torch

from tests.support.outcomes import same
from torchcomp import run_in_process
from torchcomp.aggregators import EF, Mean
from torchcomp.compressors import Cast, Identity, Quantize, RandK, TopK
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.keys import Key
from torchcomp.engine.state import State
from torchcomp.routes.allgather import AllGatherRoute
from torchcomp.routes.allreduce import AllReduceRoute
from torchcomp.routes.sharded import ShardedRoute

SHAPE = BucketShape(("a", "empty", "b", "one"), ((7, 3), (0,), (40,), ()), torch.float32)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def routed(exchange, method, dtype=torch.float32, step=0):
    """Return the route, this rank's decoded message and the mean of one random bucket."""
    shape = BucketShape(SHAPE.names, SHAPE.shapes, dtype)
    noise = torch.Generator().manual_seed(10 * step + exchange.rank)
    x = torch.randn(shape.numel, generator=noise).mul(64).round().div(64).to(dtype)
    route = method.prepared(shape, exchange, State(), torch.device("cpu")).route
    route.send(x.clone(), Key(0, step, rank=exchange.rank))
    sent = torch.zeros(shape.numel, dtype=torch.float64)
    route.sent(sent)
    mean = torch.full((shape.numel,), torch.nan, dtype=dtype)
    route.mean(mean)
    return route, sent, mean


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "compressor",
    [
        TopK(0.2),
        TopK(k=3, scope="tensor"),
        TopK(0.3, scope="model"),
        TopK(0.2, values="bf16"),
        Identity(),
        Cast("bf16"),
    ],
    ids=str,
)
def test_gathering_and_sharding_give_the_same_mean(compressor, world_size, dtype):
    # Not for int8 and int4: their blocks, and so their scales, differ between the routes.
    outcomes = [
        run_in_process(world_size, lambda e, w=way: routed(e, Mean(compressor, w), dtype)[1:])
        for way in ("allgather", "sharded")
    ]
    for gathered, sharded in zip(*outcomes, strict=True):
        assert same(gathered, sharded)
        assert same(gathered[1], outcomes[0][0][1])


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "compressor", [Identity(), RandK(0.2), RandK(k=3, scope="tensor")], ids=str
)
def test_reducing_and_gathering_give_the_same_mean_on_a_power_of_two_of_ranks(
    compressor, world_size
):
    reduced, gathered = (
        run_in_process(world_size, lambda e, w=way: routed(e, Mean(compressor, w))[1:])
        for way in ("allreduce", "allgather")
    )
    assert same(reduced, gathered)


# --- Which route ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "route"),
    [
        (Mean(), AllReduceRoute),
        (EF(Cast("bf16")), AllReduceRoute),
        (EF(RandK(0.1)), AllReduceRoute),
        (EF(Quantize("int8")), AllGatherRoute),
        (EF(TopK(0.01)), AllGatherRoute),
        (EF(TopK(0.5), "sharded"), ShardedRoute),
        (Mean(Identity(), "allgather"), AllGatherRoute),
    ],
    ids=str,
)
def test_the_route_is_that_of_the_cost(method, route):
    names = {AllReduceRoute: "allreduce", AllGatherRoute: "allgather", ShardedRoute: "sharded"}
    (taken, *_), _ = run_in_process(2, lambda e: routed(e, method))
    assert type(taken) is route
    assert method.cost(SHAPE, 2).collective == names[route]


def test_auto_takes_the_route_of_fewer_bytes_as_ranks_grow():
    shape, method = BucketShape(("w",), ((1_000_000,),), torch.float32), EF(TopK(0.01))
    collectives = [method.cost(shape, 2**power).collective for power in range(10)]
    assert collectives == sorted(collectives)
    assert collectives[1] == "allgather"
    assert collectives[-1] == "sharded"
    for world_size in (2, 64, 512):
        received = {
            way: EF(TopK(0.01), way).cost(shape, world_size).load.received
            for way in ("allgather", "sharded")
        }
        assert method.cost(shape, world_size).load.received == min(received.values())
