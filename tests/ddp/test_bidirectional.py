"""bidirectional and the sharded route, compared with serial loops written from the thesis."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torchcomp
from tests.support.cases import thorough
from tests.support.models import (
    SMALL_BUCKETS,
    gradients,
    loss_of,
    mlp,
    rows,
    weights,
    wrap,
)
from tests.support.outcomes import same
from tests.support.ranks import on_processes, on_threads
from torchcomp.aggregators import Aggregator
from torchcomp.engine.bucket import BucketShape, partition
from torchcomp.engine.keys import Key
from torchcomp.engine.prepared import Prepared
from torchcomp.engine.state import State
from torchcomp.exchange import ProcessGroupExchange
from torchcomp.reference import bidirectional, top
from torchcomp.routes import wire

STEPS = 5
SIZES = (0, 7, 1, 30, 12)
NAMES = ("empty", "a", "one", "b", "c")


def gradient(step: int, rank: int, dtype: torch.dtype, tied: bool = False) -> Tensor:
    """Return a random gradient. If `tied`, it has few magnitudes, so the order of ties matters."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    if tied:
        return torch.randint(-2, 3, (sum(SIZES),), generator=generator).to(dtype)
    return torch.randn(sum(SIZES), generator=generator, dtype=torch.float64).to(dtype)


def by_vector(cuts: list[int], k: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([top(part, min(k, len(part))) for part in x.split(cuts)])


def serial(world_size: int, dtype: torch.dtype, tied: bool, up: Any, down: Any) -> list[Tensor]:
    """The downlink messages of the thesis's algorithm."""
    ranks = range(world_size)
    history = [[{"g": gradient(t, rank, dtype, tied)} for rank in ranks] for t in range(STEPS)]
    messages, *_ = bidirectional(history, lambda x, *_: up(x), lambda x, *_: down(x))
    return [message["g"] for message in messages]


def distributed(world_size: int, spec: str, dtype: torch.dtype, tied: bool) -> list[Tensor]:
    """The same by the aggregator `spec`, on `world_size` ranks."""

    def body() -> list[Tensor]:
        exchange = ProcessGroupExchange()
        state, means, method = State(), [], torchcomp.parse(spec)
        bucket = prepared(method, exchange, state, dtype)
        for step in range(STEPS):
            g = gradient(step, exchange.rank, dtype, tied)
            method.aggregate(g, bucket, Key(0, step, rank=exchange.rank))
            exchange.conclude(torch.tensor(True), "a test", "")
            state.commit()
            means.append(g)
        return means

    outcomes = on_threads(world_size, body)
    for means in outcomes:
        assert all(map(torch.equal, means, outcomes[0]))
    return outcomes[0]


def prepared(
    method: Aggregator, exchange: ProcessGroupExchange, state: State, dtype: torch.dtype
) -> Prepared:
    shape = BucketShape(NAMES, tuple((size,) for size in SIZES), dtype)
    return method.prepared(shape, exchange, state, torch.device("cpu"))


def keep_all(x: Tensor) -> Tensor:
    return x


WHOLE = by_vector([sum(SIZES)], 6)
EACH = by_vector(list(SIZES), 3)
EXACT = 'selection="exact"'
FORMS = {
    f"bidirectional(topk(k=6), topk(k=6), {EXACT})": (WHOLE, WHOLE),
    f'bidirectional(topk(k=3, scope="tensor"), topk(k=3, scope="tensor"), {EXACT})': (EACH, EACH),
    f'bidirectional(topk(k=6), topk(k=3, scope="tensor"), {EXACT})': (WHOLE, EACH),
    f"bidirectional(identity, topk(k=6), {EXACT})": (keep_all, WHOLE),
    f"bidirectional(topk(k=6), identity, {EXACT})": (WHOLE, keep_all),
    "ef(topk(k=6))": (WHOLE, keep_all),
    'ef(topk(k=6), exchange="sharded")': (WHOLE, keep_all),
    'ef(topk(k=3, scope="tensor"), exchange="sharded")': (EACH, keep_all),
    f"bidirectional(topk(k=1000), topk(k=1000), {EXACT})": (keep_all, keep_all),
}


@pytest.mark.parametrize("spec", FORMS)
@pytest.mark.parametrize("world_size", [3, *thorough([1, 2, 5, 7])])
@pytest.mark.parametrize("dtype", [torch.float32, *thorough([torch.float64])], ids=str)
@pytest.mark.parametrize("tied", [True, *thorough([False])], ids=["tied", "distinct"])
def test_equals_one_server_bit_for_bit(
    spec: str, world_size: int, dtype: torch.dtype, tied: bool
) -> None:
    expected = serial(world_size, dtype, tied, *FORMS[spec])
    assert all(map(torch.equal, distributed(world_size, spec, dtype, tied), expected))


@pytest.mark.parametrize("world_size", [2, 7, *thorough([3, 60])])
def test_shards_are_compressed_as_separate_vectors(world_size: int) -> None:
    """On 60 ranks, which are more than there are elements, some shards are empty."""
    cuts = [r * sum(SIZES) // world_size for r in range(world_size + 1)]
    each = by_vector([b - a for a, b in pairwise(cuts)], 2)
    spec = 'bidirectional(topk(k=2), topk(k=2), selection="shard")'
    expected = serial(world_size, torch.float64, False, each, each)
    assert all(map(torch.equal, distributed(world_size, spec, torch.float64, False), expected))


def trained(spec: str, steps: int = 4) -> Tensor:
    model = wrap(mlp(torch.float32))
    torchcomp.register(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model(rows(step, torch.float32))).backward()
        optimizer.step()
    return weights(model)


def test_gives_the_same_weights_over_gloo_and_over_threads() -> None:
    exact = f"bidirectional(topk(0.1), topk(0.1), {EXACT})"
    for spec in (exact, "bidirectional(topk(0.1), topk(0.1))", 'ef(topk(0.1), exchange="sharded")'):
        assert torch.equal(on_processes(3, trained, spec)[2], on_threads(3, trained, spec)[0])


def test_scope_model_selects_from_all_gradients_together() -> None:
    spec = f'bidirectional(topk(k=9, scope="model"), topk(k=5, scope="model"), {EXACT})'

    def body() -> tuple[Tensor, Tensor]:
        model = wrap(mlp())
        named = list(model.module.named_parameters())
        cap = int(SMALL_BUCKETS * 2**20)
        order = [name for group in partition(named, (cap,)) for name in group]
        torchcomp.register(model, spec)
        alone = mlp()
        loss_of(alone(rows(0))).backward()
        loss_of(model(rows(0))).backward()
        own, mean = gradients(alone), gradients(model)
        flat = [torch.cat([g[name].flatten() for name in order]) for g in (own, mean)]
        return flat[0], flat[1]

    outcomes = on_threads(2, body)
    expected = top((top(outcomes[0][0], 9) + top(outcomes[1][0], 9)) / 2, 5)
    for _, mean in outcomes:
        assert torch.equal(mean, expected)


# --- Damaged messages -----------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["up", "down", "gather"])
def test_a_damaged_message_raises_on_every_rank_and_changes_nothing(route: str) -> None:
    """Rank 1 damages its first frame of step 2 in one direction."""
    message = rf"\bstep 2\b.* rank 1's .*{re.escape(wire.FINDINGS[wire.DAMAGED])}"
    spec = "ef(topk(0.2))" if route == "gather" else f"bidirectional(topk(0.2), topk(0.2), {EXACT})"
    method = {"up": "all_to_all", "down": "all_gather_v", "gather": "all_gather_rows"}[route]

    def body() -> None:
        model = wrap(mlp(), bucket_cap_mb=None)
        handle = torchcomp.register(model, spec, checksum=True)
        loss_of(model(rows(0))).backward()
        before = handle.state_dict()
        exchange = handle.averager.exchange
        send = getattr(exchange, method)

        def damaged(outgoing: Tensor, *sizes: object) -> object:
            if outgoing.dtype == torch.uint8 and dist.get_rank() == 1:
                outgoing = outgoing.clone()  # the memory is used again in the next step
                outgoing[17].bitwise_xor_(4)
            return send(outgoing, *sizes)

        with mock.patch.object(exchange, method, damaged):
            model.zero_grad()
            with pytest.raises(torchcomp.WireError, match=message):
                loss_of(model(rows(1))).backward()
        assert same(handle.state_dict()["slots"], before["slots"])
        model.zero_grad()
        loss_of(model(rows(1))).backward()
        assert handle.stats.steps == 2

    on_threads(3, body)


# --- Invalid specs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"bidirectional(randk(0.1), topk(0.1), {EXACT})", r'\brandk\b.* selection="shard"'),
        (
            f'bidirectional(topk(0.1), quantize("int8"), {EXACT})',
            r'\bquantize\b.* selection="shard"',
        ),
        (
            'bidirectional(randk(0.1, unbiased=True), identity, selection="shard")',
            r"bidirectional .*contractive.* randk\(0\.1, unbiased=True\)",
        ),
        ('bidirectional(topk(0.1), topk(0.1), selection="some")', '"exact", "shard".*some'),
        ("bidirectional(topk(0.1))", "'down'"),
        ('bidirectional(topk(0.1), down="identify")', "'identify'.*'identity'"),
        ('ef(randk(0.1), exchange="sharded")', r'"sharded".* randk\b.*"allgather"'),
        ('topk(0.1, values="fp8")', '"bf16", "fp16", "int8", "int4"'),
        ('topk(0.1, rounding="stochastic")', "rounding.*values|values.*rounding"),
    ],
)
def test_invalid_specs_raise_with_the_reason(spec: str, message: str) -> None:
    with pytest.raises(torchcomp.SpecError, match=message):
        torchcomp.parse(spec)
