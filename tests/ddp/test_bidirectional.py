"""bidirectional and the sharded exchange against serial loops written from the thesis."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torchcomp
from tests.support.models import (
    SMALL_BUCKETS,
    gradients,
    loss_of,
    mlp,
    raised_by,
    rows,
    weights,
    wrap,
)
from tests.support.ranks import on_processes, on_threads
from torchcomp.aggregators.agreement import Agreed, Question, agree, order_bits
from torchcomp.bucket import Bucket, Caps, partition
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.state import State

STEPS = 5
SIZES = (0, 7, 1, 30, 12)
NAMES = ("empty", "a", "one", "b", "c")


def gradient(step: int, rank: int, dtype: torch.dtype, tied: bool = False) -> Tensor:
    """Tied: few different magnitudes, so that the order of equals matters."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    if tied:
        return torch.randint(-2, 3, (sum(SIZES),), generator=generator).to(dtype)
    return torch.randn(sum(SIZES), generator=generator, dtype=torch.float64).to(dtype)


def top(x: Tensor, k: int) -> Tensor:
    """The k largest magnitudes, among equals the lowest index."""
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
    """The thesis's algorithm with one server; weights 1/N, the learning rate outside."""
    eps = [torch.zeros(sum(SIZES), dtype=dtype) for _ in range(world_size)]
    delta = torch.zeros(sum(SIZES), dtype=dtype)
    answers = []
    for step in range(STEPS):
        s = torch.zeros(sum(SIZES), dtype=dtype)
        for q in range(world_size):
            a = gradient(step, q, dtype, tied) + eps[q]
            sent = up(a)
            eps[q] = a - sent
            s += sent
        s = s / world_size + delta
        answers.append(down(s))
        delta = s - answers[-1]
    return answers


def distributed(world_size: int, spec: str, dtype: torch.dtype, tied: bool) -> list[Tensor]:
    def body() -> list[Tensor]:
        exchange = Exchange(None, torch.device("cpu"))
        state, answers = State(), []
        for step in range(STEPS):
            bucket = Bucket(NAMES, SIZES, gradient(step, exchange.rank, dtype, tied))
            key = Key(0, step, rank=exchange.rank)
            torchcomp.parse(spec).aggregate(bucket, exchange, state, key)
            exchange.conclude(torch.tensor(True), "a test", "")
            state.commit()
            answers.append(bucket.flat)
        return answers

    outcomes = on_threads(world_size, body)
    for answers in outcomes:
        assert all(map(torch.equal, answers, outcomes[0]))
    return outcomes[0]


def keep_all(x: Tensor) -> Tensor:
    return x


WHOLE = by_vector([sum(SIZES)], 6)
EACH = by_vector(list(SIZES), 3)
FORMS = {
    "bidirectional(topk(k=6), topk(k=6))": (WHOLE, WHOLE),
    'bidirectional(topk(k=3, scope="tensor"), topk(k=3, scope="tensor"))': (EACH, EACH),
    'bidirectional(topk(k=6), topk(k=3, scope="tensor"))': (WHOLE, EACH),
    "bidirectional(identity, topk(k=6))": (keep_all, WHOLE),
    "bidirectional(topk(k=6), identity)": (WHOLE, keep_all),
    "ef(topk(k=6))": (WHOLE, keep_all),
    'ef(topk(k=6), exchange="sharded")': (WHOLE, keep_all),
    'ef(topk(k=3, scope="tensor"), exchange="sharded")': (EACH, keep_all),
    "bidirectional(topk(k=1000), topk(k=1000))": (keep_all, keep_all),
}


@pytest.mark.parametrize("spec", FORMS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["distinct", "tied"])
def test_equals_one_server_bit_for_bit(
    spec: str, world_size: int, dtype: torch.dtype, tied: bool
) -> None:
    expected = serial(world_size, dtype, tied, *FORMS[spec])
    assert all(map(torch.equal, distributed(world_size, spec, dtype, tied), expected))


@pytest.mark.parametrize("world_size", [2, 3, 7, 60])
def test_shards_by_themselves_are_vectors(world_size: int) -> None:
    """With more ranks than elements, some shards are empty."""
    cuts = [r * sum(SIZES) // world_size for r in range(world_size + 1)]
    each = by_vector([b - a for a, b in pairwise(cuts)], 2)
    spec = 'bidirectional(topk(k=2), topk(k=2), selection="shard")'
    expected = serial(world_size, torch.float64, False, each, each)
    assert all(map(torch.equal, distributed(world_size, spec, torch.float64, False), expected))


def check_agreement(values: Tensor, sizes: tuple[int, ...], k: int, guess: int | None) -> None:
    """Compare what ranks with parts of `values` agree on with a sort of the whole."""

    def body() -> Agreed:
        bits = order_bits(values.split(sizes)[dist.get_rank()])
        question = Question(bits, sizes, k, guess)
        return agree(Exchange(None, torch.device("cpu")), [question])[0]

    magnitude = values.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    kept = torch.sort(magnitude, descending=True, stable=True).indices[:k]
    owner = torch.repeat_interleave(torch.tensor(sizes))
    counts = tuple(torch.bincount(owner[kept], minlength=len(sizes)).tolist())
    for agreed in on_threads(len(sizes), body):
        assert agreed.counts == counts


@pytest.mark.parametrize("few", [True, False], ids=["shown", "digits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_both_ways_to_agree_find_the_largest(
    few: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Question, "few", few)
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-50, 51, (90,), generator=generator).to(dtype) / 7
    values[[3, 40]] = torch.tensor([torch.nan, -torch.inf], dtype=dtype)
    for k in (1, 2, 30, 89, 90):
        check_agreement(values, (20, 0, 63, 7), k, None)


@pytest.mark.parametrize("away", [None, 1.0, 1.1, 0.9, 3.0, 0.1, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["distinct", "tied"])
def test_no_guess_of_the_threshold_changes_the_answer(
    away: float | None, dtype: torch.dtype, tied: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20_000, generator=generator, dtype=dtype)
    values[::7] = 2.0 if tied else values[::7]
    values[[5, 19_000]] = torch.tensor([torch.inf, torch.nan], dtype=dtype)
    for k in (1, 700, 5000, 19_999):
        threshold = (
            values.abs()
            .nan_to_num(nan=torch.inf, posinf=torch.inf)
            .sort(descending=True)
            .values[k - 1]
        )
        guess = None if away is None else int(order_bits(threshold.mul(away).view(1)))
        for sizes in ((9000, 1, 0, 10_999), (1, 0, *[2000] * 9, 1999)):
            check_agreement(values, sizes, k, guess)


def test_a_good_guess_saves_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on, owners agree in two small messages."""
    rounds, exchanged = [], Exchange._all_to_all

    def counted(self: Exchange, *places: Any) -> None:
        rounds.append(self.rank)
        exchanged(self, *places)

    monkeypatch.setattr(Exchange, "_all_to_all", counted)
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    threshold = values.abs().sort(descending=True).values[699]
    guess = int(order_bits(threshold.mul(1.02).view(1)))
    check_agreement(values, (10_000, 10_000), 700, guess)
    assert sorted(rounds) == [0, 0, 1, 1]


def test_where_all_is_wanted_nothing_is_agreed_on() -> None:
    spec = "bidirectional(topk(1.0), topk(1.0))"

    def body() -> tuple[int, int]:
        exchange = Exchange(None, torch.device("cpu"))
        bucket = Bucket(NAMES, SIZES, gradient(0, exchange.rank, torch.float32))
        torchcomp.parse(spec).aggregate(bucket, exchange, State(), Key(0))
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


def test_gathered_and_sharded_error_feedback_train_alike() -> None:
    gathered = on_threads(3, trained, 'ef(topk(0.1), exchange="gather")')
    sharded = on_threads(3, trained, 'ef(topk(0.1), exchange="sharded")')
    assert all(torch.equal(weight, gathered[0]) for weight in gathered + sharded)


def test_trains_over_gloo_as_over_threads() -> None:
    for spec in ("bidirectional(topk(0.1), topk(0.1))", 'ef(topk(0.1), exchange="sharded")'):
        assert torch.equal(on_processes(3, trained, spec)[2], on_threads(3, trained, spec)[0])


def test_scope_model_selects_from_all_gradients_at_once() -> None:
    spec = 'bidirectional(topk(k=9, scope="model"), topk(k=5, scope="model"))'

    def body() -> tuple[Tensor, Tensor]:
        model = wrap(mlp())
        named = list(model.module.named_parameters())
        cap = int(SMALL_BUCKETS * 2**20)
        order = [name for group in partition(named, Caps(cap, cap)) for name in group]
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


# --- Messages that cannot be used -----------------------------------------------------------------

DAMAGES = {
    "flipped bit": (lambda frame: frame[17].bitwise_xor_(4), "damaged"),
    "other version": (lambda frame: frame[0].add_(1), "another version"),
    "other length": (lambda frame: frame[1].add_(1), "another length"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("route", ["up", "down", "gather"])
def test_a_damaged_message_stops_all_ranks_and_nothing_is_applied(route: str, damage: str) -> None:
    """Rank 1 damages its first frame of step 2, in one direction, and of no other step."""
    spoil, problem = DAMAGES[damage]
    spec = "ef(topk(0.2))" if route == "gather" else "bidirectional(topk(0.2), topk(0.2))"
    method = {"up": "scatter", "down": "gather_varied", "gather": "gather"}[route]

    def body() -> None:
        model = wrap(mlp(), bucket_cap_mb=None)
        handle = torchcomp.register(model, spec)
        loss_of(model(rows(0))).backward()
        before = handle.state_dict()
        send = getattr(handle._exchange, method)

        def damaged(outgoing: Tensor, *sizes: object) -> object:
            if outgoing.dtype == torch.uint8 and dist.get_rank() == 1:
                spoil(outgoing)
            return send(outgoing, *sizes)

        with mock.patch.object(handle._exchange, method, damaged):
            model.zero_grad()
            with pytest.raises(torchcomp.WireError, match=f"step 2 .*rank 1's .*{problem}"):
                loss_of(model(rows(1))).backward()
        after = handle.state_dict()
        for memory in ("error", "owner"):
            assert all(torch.equal(after[memory][n], t) for n, t in before[memory].items())
        assert after["step"] == 1
        model.zero_grad()
        loss_of(model(rows(1))).backward()
        assert handle.stats.steps == 2

    on_threads(3, body)


CONTROL = {
    "counts": ("topk(0.05)", 0, 0),
    "counts, more than there are": ("topk(0.05)", 0, 0),
    "candidates of the first step": ("topk(0.05)", 0, 1),
    "first digits, sum": ("topk(0.5)", 0, 1),
    "first digits, summed": ("topk(0.5)", 0, 2),
    "shares of the first step": ("topk(0.5)", 0, 7),
    "histograms": ("topk(0.05)", 2, 1),
    "candidates in the bin": ("topk(0.05)", 2, 2),
}
"""Compressor, step and place in the step of the control message that comes in damaged."""


def meets_damaged_control(case: str) -> str:
    """The error of a step in which rank 0 gets a damaged control message from rank 1."""
    spec, at, place = CONTROL[case]
    model = wrap(torch.nn.Linear(100, 100, bias=False))
    handle = torchcomp.register(model, f"bidirectional({spec}, {spec})")
    exchanged, seen = handle._exchange._all_to_all, []

    def damaged(received: Tensor, outgoing: Tensor, arriving: list[int], sizes: list[int]) -> None:
        exchanged(received, outgoing, arriving, sizes)
        if received.dtype != torch.uint8 and handle.step == at:
            seen.append(arriving)
            if len(seen) == place + 1 and dist.get_rank() == 0:
                received[arriving[0]] += 1 << 30 if "more" in case else 1

    def loss(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        return model(torch.randn(8, 100, generator=generator)).square().mean()

    with mock.patch.object(handle._exchange, "_all_to_all", damaged):
        for step in range(at):
            loss(step).backward()
        error = raised_by(loss(at).backward)
    return f"{type(error).__name__}: {error}"


def all_meet_damaged_control() -> list[str]:
    return [meets_damaged_control(case) for case in CONTROL]


def test_a_damaged_control_message_stops_all_ranks_and_names_its_sender() -> None:
    """Over processes: only a real transport takes messages that are shorter than announced."""
    for errors in on_processes(3, all_meet_damaged_control):
        for case, error in zip(CONTROL, errors, strict=True):
            step = CONTROL[case][1] + 1
            told = f"WireError: a message of step {step} cannot be used: rank 1's was damaged"
            assert error.startswith(told), (case, error)
            assert "rank 0" not in error, case
            assert "rank 2" not in error, case


# --- What cannot be built -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("bidirectional(randk(0.1), topk(0.1))", 'randk works on whole vectors.*"shard"'),
        ('bidirectional(topk(0.1), quantize("int8"))', 'quantize works on whole vectors.*"shard"'),
        (
            'bidirectional(randk(0.1, unbiased=True), identity, selection="shard")',
            "needs a contractive compressor",
        ),
        ('bidirectional(topk(0.1), topk(0.1), selection="some")', '"exact", "shard"'),
        ("bidirectional(topk(0.1))", "needs 'down'"),
        ('bidirectional(topk(0.1), down="identify")', "did you mean 'identity'"),
        ('ef(randk(0.1), exchange="sharded")', "randk makes one for the whole bucket"),
        ('topk(0.1, values="fp8")', '"bf16", "fp16", "int8", "int4"'),
        ('topk(0.1, rounding="stochastic")', "goes with values"),
    ],
)
def test_what_cannot_go_a_way_is_refused_with_the_reason(spec: str, problem: str) -> None:
    with pytest.raises(torchcomp.SpecError, match=problem):
        torchcomp.parse(spec)


def test_a_compressor_may_stand_in_quotes() -> None:
    quoted = 'bidirectional(up="topk(k=1)", down="identity")'
    assert str(torchcomp.parse(quoted)) == "bidirectional(topk(k=1), identity)"
