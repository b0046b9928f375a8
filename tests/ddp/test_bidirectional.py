"""bidirectional and the sharded route, compared with serial loops written from the thesis."""

import re
from collections.abc import Callable
from itertools import pairwise
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
    kept,
    loss_of,
    mlp,
    rows,
    weights,
    wrap,
)
from tests.support.ranks import on_processes, on_threads
from torchcomp import wire
from torchcomp.aggregators import Aggregator
from torchcomp.bucket import BucketShape, partition
from torchcomp.exchange import ProcessGroupExchange
from torchcomp.keys import Key
from torchcomp.prepared import Prepared
from torchcomp.state import State

STEPS = 5
SIZES = (0, 7, 1, 30, 12)
NAMES = ("empty", "a", "one", "b", "c")


def gradient(step: int, rank: int, dtype: torch.dtype, tied: bool = False) -> Tensor:
    """Return a random gradient. If `tied`, it has few magnitudes, so the order of ties matters."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    if tied:
        return torch.randint(-2, 3, (sum(SIZES),), generator=generator).to(dtype)
    return torch.randn(sum(SIZES), generator=generator, dtype=torch.float64).to(dtype)


def top(x: Tensor, k: int) -> Tensor:
    """Keep the k largest magnitudes, with ties by the lowest index, and zero the others."""
    kept = sorted(range(len(x)), key=lambda i: (-abs(float(x[i])), i))[:k]
    out = torch.zeros_like(x)
    out[kept] = x[kept]
    return out


def by_vector(cuts: list[int], k: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([top(part, min(k, len(part))) for part in x.split(cuts)])


def serial(
    world_size: int,
    dtype: torch.dtype,
    tied: bool,
    up: Callable[[Tensor], Tensor],
    down: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """The thesis's algorithm with one server, weights 1/N, and no learning rate in the residuals.

    Returns:
        The downlink message of every step.
    """
    eps = [torch.zeros(sum(SIZES), dtype=dtype) for _ in range(world_size)]
    delta = torch.zeros(sum(SIZES), dtype=dtype)
    downlinks = []
    for step in range(STEPS):
        s = torch.zeros(sum(SIZES), dtype=dtype)
        for q in range(world_size):
            a = gradient(step, q, dtype, tied) + eps[q]
            sent = up(a)
            eps[q] = a - sent
            s += sent
        s = s / world_size + delta
        downlinks.append(down(s))
        delta = s - downlinks[-1]
    return downlinks


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


def test_explain_counts_the_search_exactly() -> None:
    spec = f"bidirectional(topk(1.0), topk(1.0), {EXACT})"

    def body() -> tuple[int, int]:
        exchange = ProcessGroupExchange()
        method = torchcomp.parse(spec)
        bucket = prepared(method, exchange, State(), torch.float32)
        method.aggregate(gradient(0, exchange.rank, torch.float32), bucket, Key(0))
        plan = torchcomp.explain(spec, numel=sum(SIZES), world_size=3, rank=exchange.rank)
        return exchange.take_traffic(0).sent, plan.bytes_sent

    for sent, planned in on_threads(3, body):
        assert sent == planned


def trained(spec: str, steps: int = 4) -> Tensor:
    model = wrap(mlp(torch.float32))
    torchcomp.register(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model(rows(step, torch.float32))).backward()
        optimizer.step()
    return weights(model)


def test_gathered_and_sharded_error_feedback_give_the_same_weights() -> None:
    gathered = on_threads(3, trained, 'ef(topk(0.1), exchange="allgather")')
    sharded = on_threads(3, trained, 'ef(topk(0.1), exchange="sharded")')
    assert all(torch.equal(weight, gathered[0]) for weight in gathered + sharded)


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

DAMAGES = {
    "flipped bit": (lambda frame: frame[17].bitwise_xor_(4), wire.DAMAGED),
    "no frame": (lambda frame: frame[1].add_(1), wire.NO_FRAME),
    "other version": (lambda frame: frame[0].add_(1), wire.OTHER_VERSION),
    "other length": (lambda frame: frame[2].add_(1), wire.OTHER_LENGTH),
    "other layout": (lambda frame: frame[8].add_(1), wire.OTHER_LAYOUT),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("route", ["up", "down", "gather"])
def test_a_damaged_message_raises_on_every_rank_and_changes_nothing(
    route: str, damage: str
) -> None:
    """Rank 1 damages its first frame of step 2 in one direction. All other steps are intact."""
    spoil, finding = DAMAGES[damage]
    message = rf"\bstep 2\b.* rank 1's .*{re.escape(wire.FINDINGS[finding])}"
    spec = "ef(topk(0.2))" if route == "gather" else f"bidirectional(topk(0.2), topk(0.2), {EXACT})"
    method = {"up": "all_to_all", "down": "all_gather_v", "gather": "all_gather_rows"}[route]

    def body() -> None:
        model = wrap(mlp(), bucket_cap_mb=None)
        # Each finding in the frames of one kind: the checksum also covers the layout.
        handle = torchcomp.register(model, spec, checksum=finding == wire.DAMAGED)
        loss_of(model(rows(0))).backward()
        before = handle.state_dict()
        exchange = handle.averager.exchange
        send = getattr(exchange, method)

        def damaged(outgoing: Tensor, *sizes: object) -> object:
            if outgoing.dtype == torch.uint8 and dist.get_rank() == 1:
                outgoing = outgoing.clone()  # the memory is used again in the next step
                spoil(outgoing)
            return send(outgoing, *sizes)

        with mock.patch.object(exchange, method, damaged):
            model.zero_grad()
            with pytest.raises(torchcomp.WireError, match=message):
                loss_of(model(rows(1))).backward()
        after = handle.state_dict()
        for slot in before["slots"]:
            assert all(torch.equal(kept(after, slot)[n], t) for n, t in kept(before, slot).items())
        assert after["step"] == 1
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


def test_a_compressor_can_be_a_quoted_string() -> None:
    quoted = 'bidirectional(up="topk(k=1)", down="identity")'
    assert str(torchcomp.parse(quoted)) == "bidirectional(topk(k=1), identity)"
