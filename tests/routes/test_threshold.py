"""Distributed selection of the k largest: the same result as on one rank with the whole vector."""

import math

import pytest
import torch

from torchcomp import run_in_process
from torchcomp.kernels import select
from torchcomp.kernels.segments import Segment
from torchcomp.routes.threshold import Query, chosen, find_largest, order_bits, search_load

WORLD_SIZES = [1, 2, 3, 5, 9]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def largest(x, k):
    return select.largest(x, [Segment(0, x.numel(), k)])


def gaussian(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def vectors(n):
    few = gaussian(n).mul(2).round()
    spread = gaussian(n) * 10.0 ** (gaussian(n, 1) * 6).clamp(-30, 30)
    odd = gaussian(n)
    odd[:: max(1, n // 5)] = torch.tensor(math.inf)
    odd[1 :: max(2, n // 4)] = torch.tensor(math.nan)
    half = gaussian(n)
    half[n // 3 :] = 0
    return {
        "gaussian": gaussian(n),
        "ties": few,
        "all equal": torch.full((n,), -0.75, dtype=torch.float64),
        "zeros": torch.zeros(n, dtype=torch.float64),
        "mostly zeros": half,
        "spread": spread,
        "denormal": gaussian(n) * 1e-42,
        "not finite": odd,
        "all infinite": torch.full((n,), math.inf, dtype=torch.float64),
    }


def divided(x, ranks):
    """Split `x` into one part per rank, of uneven sizes; some parts can be empty."""
    cuts = [0, *sorted((rank * rank * x.numel()) // (ranks * ranks) for rank in range(1, ranks))]
    return [x[start:stop] for start, stop in zip(cuts, [*cuts[1:], x.numel()], strict=True)]


def candidates_of(parts, k):
    """Return each rank's candidates, the k largest of its part, and their positions in the part."""
    picked = [largest(part, min(k, part.numel())) for part in parts]
    return [order_bits(part[index]) for part, index in zip(parts, picked, strict=True)], picked


class Counted:
    """An exchange that counts its collectives."""

    def __init__(self, exchange):
        self.exchange, self.calls = exchange, []

    def __getattr__(self, name):
        if name.startswith("all_"):
            self.calls.append(name)
        return getattr(self.exchange, name)


def search(ranks, cases):
    """Search for (parts, k, guess) cases.

    Returns, for every rank: the selections, the selected positions, the collectives and the bytes.
    """

    def body(exchange):
        queries, own = [], []
        for parts, k, guess in cases:
            candidates, picked = candidates_of(parts, k)
            sizes = [each.numel() for each in candidates]
            queries.append(Query(candidates[exchange.rank], sizes, k, guess))
            own.append(picked[exchange.rank])
        counted = Counted(exchange)
        found = find_largest(counted, queries)
        positions = [
            index[chosen(query.candidates, selection.threshold, selection.counts[exchange.rank])]
            for index, query, selection in zip(own, queries, found, strict=True)
        ]
        return found, positions, counted.calls, exchange.take_traffic(0)

    return run_in_process(ranks, body)


def assert_selects_topk(ranks, cases):
    """Require that all ranks together select the topk of the whole vector."""
    outcomes = search(ranks, cases)
    assert all(outcome[0] == outcomes[0][0] for outcome in outcomes)
    for i, (parts, k, _) in enumerate(cases):
        starts = torch.tensor([0, *[part.numel() for part in parts]]).cumsum(0)
        selected = [outcome[1][i] + starts[rank] for rank, outcome in enumerate(outcomes)]
        expected = largest(torch.cat(list(parts)), k)
        assert torch.equal(torch.cat(selected), expected), i
        counts = [index.numel() for index in selected]
        assert list(outcomes[0][0][i].counts) == counts
    return outcomes


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_largest_of_all_parts_are_the_topk_of_the_whole(dtype, ranks):
    cases = []
    for n, ks in ((1, [1]), (40, [40]), (500, [3, 72])):
        for x in vectors(n).values():
            cases += [(divided(x.to(dtype), ranks), k, 0) for k in ks]
    assert_selects_topk(ranks, cases)


def threshold_of(x, k):
    """The k-th largest of `x`, as an integer from `order_bits`."""
    return int(order_bits(x).sort(descending=True).values[k - 1])


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_guess_never_changes_the_selection(dtype, ranks):
    cases = []
    for x in vectors(600).values():
        x, k = x.to(dtype), 72
        right, width = threshold_of(x, k), 2 ** (8 * dtype.itemsize - 1)
        octave = 2**23 if dtype == torch.float32 else 2**52
        guesses = {right - 3 * octave, right - octave, right - 1, right + 1, right + octave}
        guesses |= {right + 3 * octave, 1, -1, -(2**63), width - 1, width, 2**63 - 1, right}
        cases += [(divided(x, ranks), k, guess) for guess in sorted(guesses)]
    assert_selects_topk(ranks, cases)


def test_a_threshold_far_above_the_guess_is_found():
    # The threshold is above the window of two octaves around the guess.
    parts = [torch.rand(72, generator=torch.Generator().manual_seed(r)) + 2 for r in range(2)]
    assert_selects_topk(2, [(parts, 72, 987_595_940)])


def test_a_good_guess_takes_one_round_of_histograms():
    x = gaussian(100_000).float()
    k = 1000
    for guess in (threshold_of(x, k), threshold_of(x * 1.1, k), threshold_of(x * 0.9, k)):
        outcomes = assert_selects_topk(4, [(divided(x, 4), k, guess)])
        # One histogram, then the candidates in one of its bins.
        assert [outcome[2] for outcome in outcomes] == [["all_gather_rows", "all_gather_v"]] * 4


def test_without_a_guess_it_takes_more_rounds():
    x = gaussian(100_000).float()
    calls = assert_selects_topk(4, [(divided(x, 4), 1000, 0)])[0][2]
    assert 2 <= calls.count("all_gather_rows") <= 6


def test_several_queries_share_their_rounds():
    xs = [gaussian(20_000, seed).float() * 10.0**seed for seed in range(3)]
    cases = [(divided(x, 3), 500, threshold_of(x, 500)) for x in xs]
    separately = [assert_selects_topk(3, [case])[0][2] for case in cases]
    assert assert_selects_topk(3, cases)[0][2] == max(separately, key=len)


def test_few_candidates_are_gathered_without_a_histogram():
    calls = assert_selects_topk(3, [(divided(gaussian(12).float(), 3), 2, 0)])[0][2]
    assert calls == ["all_gather_v"]


def test_selecting_all_candidates_needs_no_exchange():
    def body(exchange, k):
        found = find_largest(exchange, [Query(order_bits(torch.ones(3)), [3, 3], k)])
        return found[0], exchange.take_traffic(0).sent

    for k in (6, 7):
        selection, sent = run_in_process(2, lambda e, k=k: body(e, k))[0]
        assert (selection.threshold, list(selection.counts), sent) == (0, [3, 3], 0)


def test_an_interval_of_one_value_is_not_gathered():
    # All candidates are equal, so their counts are enough: only histograms are exchanged.
    x = torch.full((4000,), 0.5)
    calls = assert_selects_topk(2, [(divided(x, 2), 1000, threshold_of(x, 1))])[0][2]
    assert set(calls) == {"all_gather_rows"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_planned_load_is_about_the_counted_one(ranks):
    x, k = gaussian(50_000).float(), 500
    parts = [part.contiguous() for part in x.chunk(ranks)]
    for outcome in search(ranks, [(parts, k, threshold_of(x, k))]):
        planned = search_load([(k, k * ranks, k)], 4, ranks)
        # The plan counts only histograms, because it cannot know how many candidates a bin has.
        assert planned.sent <= outcome[3].sent <= 3 * planned.sent
        assert planned.received <= outcome[3].received <= 3 * planned.received


def test_order_bits_order_like_magnitudes():
    x = torch.tensor([0.0, -1e-45, 1e-38, -1.0, 1.5, -3e38, math.inf, -math.inf, math.nan])
    for dtype in DTYPES:
        bits = order_bits(x.to(dtype))
        assert bits.dtype == (torch.int64 if dtype == torch.float64 else torch.int32)
        assert (bits.diff() >= 0).all()
        assert (bits >= 0).all()
        assert len(set(bits[-3:].tolist())) == 1
