"""Distributed selection of the k largest: the same result as on one rank with the whole vector."""

import math
from itertools import accumulate, pairwise

import pytest
import torch

from torchcomp import run_in_process
from torchcomp.compressors import TopK
from torchcomp.engine.bucket import BucketShape
from torchcomp.kernels import select
from torchcomp.kernels.segments import Segment
from torchcomp.routes.searches import HostSearch, order_bits, search_load
from torchcomp.routes.shards import direction

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
HISTOGRAM, CANDIDATES = "all_gather_rows", "all_gather_v"


def gaussian(n, dtype=torch.float64):
    return torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(dtype)


def vectors(n, dtype):
    """A vector of each kind that a search could treat wrongly."""
    x = gaussian(n)
    half, odd = x.clone(), x.clone()
    half[n // 3 :] = 0
    odd[:: max(1, n // 5)], odd[1 :: max(2, n // 4)] = math.inf, math.nan
    spread = x * 10.0 ** (x.flip(0) * 6).clamp(-30, 30)
    equal = torch.full_like(x, -0.75)
    kinds = [x, x.mul(2).round(), equal, torch.zeros_like(x), half, spread, x * 1e-42, odd]
    return [each.to(dtype) for each in kinds]


def threshold_of(x, k):
    """The k-th largest of `x`, as an integer from `order_bits`."""
    return int(order_bits(x).sort(descending=True).values[min(k, len(x)) - 1])


class Counted:
    """An exchange that lists its collectives."""

    def __init__(self, exchange):
        self.exchange, self.calls = exchange, []

    def __getattr__(self, name):
        if name.startswith("all_"):
            self.calls.append(name)
        return getattr(self.exchange, name)


def searched(xs, k, ranks, guesses=None):
    """Search several vectors of one bucket, and require that the topk of each is found.

    Returns:
        The collectives of a rank, and the traffic of each.
    """
    shape = BucketShape(tuple(map(str, range(len(xs)))), tuple((len(x),) for x in xs), xs[0].dtype)
    down = direction("down", TopK(k=k, scope="tensor"), "exact", shape, ranks)
    whole, before = torch.cat(xs), torch.tensor(guesses or [0] * len(xs))
    ends = pairwise(accumulate((len(x) for x in xs), initial=0))
    expected = select.largest(whole, [Segment(a, b - a, min(k, b - a)) for a, b in ends])

    def work(exchange):
        rank, counted = exchange.rank, Counted(exchange)
        search = HostSearch(down, counted, torch.device("cpu"))
        own = down.shards[rank]
        g = whole[own.start : own.stop]
        out, after = torch.empty_like(g), torch.zeros_like(before)
        index, counts = search(g, torch.zeros_like(g), out, before, after)
        mine = expected[(expected >= own.start) & (expected < own.stop)] - own.start
        assert torch.equal(index[: len(mine)], mine)
        pieces = [len(pieces) for pieces in down.pieces]
        assert counts.split(pieces)[rank].sum() == len(mine)
        looked = zip(down.searched, xs, strict=True)
        assert after.tolist() == [threshold_of(x, k) if across else 0 for across, x in looked]
        return counted.calls, exchange.take_traffic(0)

    outcomes = run_in_process(ranks, work)
    assert all(calls == outcomes[0][0] for calls, _ in outcomes)
    return outcomes[0][0], [traffic for _, traffic in outcomes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_ranks_select_what_one_rank_would(ranks, dtype):
    for n, ks in ((1, [1]), (67, [1, 20, 66, 67]), (500, [72])):
        for k in ks:
            searched([*vectors(n, dtype), gaussian(3, dtype)], k, ranks)
            searched([gaussian(n, dtype)], k, ranks)  # alone


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_guess_never_changes_the_selection(dtype, ranks):
    xs, k, width = vectors(600, dtype), 72, 2 ** (8 * dtype.itemsize - 1)
    octave = 2**23 if dtype == torch.float32 else 2**52
    for off in (-3 * octave, -octave, -1, 0, 1, octave, 3 * octave):
        guesses = [threshold_of(x, k) + off for x in xs]
        searched(xs, k, ranks, [min(max(guess, -(2**63)), width) for guess in guesses])
    for guess in (1, -1, -(2**63), width - 1, 2**63 - 1):
        searched(xs, k, ranks, [guess] * len(xs))


def test_a_good_guess_takes_one_round_of_histograms_and_none_takes_more():
    xs = [gaussian(100_000 + i).float() * 10.0**i for i in range(3)]
    assert 2 <= searched(xs, 1000, 4)[0].count(HISTOGRAM) <= 6
    for scale in (1, 1.1, 0.9):
        guesses = [threshold_of(x * scale, 1000) for x in xs]
        assert searched(xs, 1000, 4, guesses)[0] == [HISTOGRAM, CANDIDATES]


def test_messages_that_would_tell_nothing_are_not_sent():
    few, equal = gaussian(12).float(), torch.full((4000,), 0.5)
    assert searched([few], 2, 3)[0] == [CANDIDATES]
    calls, _ = searched([equal], 1000, 2, [threshold_of(equal, 1)])
    assert set(calls) == {HISTOGRAM}, "the counts of equal candidates are enough"
    assert searched([few], 12, 2)[0] == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_planned_load_is_about_the_counted_one(ranks):
    x, k = gaussian(50_000).float(), 500
    planned = search_load([(k, k * ranks, k)], 4, ranks)
    for traffic in searched([x], k, ranks, [threshold_of(x, k)])[1]:
        # The plan counts only histograms, because it cannot know how many candidates a bin has.
        assert planned.sent <= traffic.sent <= 3 * planned.sent
        assert planned.received <= traffic.received <= 3 * planned.received
