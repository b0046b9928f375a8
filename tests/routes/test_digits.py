"""Distributed selection of the k largest: the same result as on one rank with the whole vector."""

import math
from itertools import pairwise

import pytest
import torch

from torchcomp import run_in_process
from torchcomp.kernels import select
from torchcomp.kernels.segments import Segment
from torchcomp.routes.digits import DigitSearch, order_bits, search_load

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def vectors(n, dtype):
    """A vector of each kind that a search could treat wrongly."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    odd = x.clone()
    odd[:: max(1, n // 5)], odd[1 :: max(2, n // 4)] = math.inf, math.nan
    kinds = [x, x.mul(2).round(), torch.full_like(x, -0.75), torch.zeros_like(x), x * 1e-42, odd]
    return [each.to(dtype) for each in kinds]


def searched(parts, k, dtype):
    """Search two vectors, the second of which only the last rank has; return what ranks find."""
    ranks = len(parts)
    at = [0, 2, *range(4, 2 * ranks, 2), 2 * ranks - 1] if ranks > 1 else [0, 1]
    total = sum(part.numel() for part in parts)

    def work(exchange):
        own, last = parts[exchange.rank], exchange.rank == ranks - 1
        x = torch.cat([own, own[:1]]) if last else own
        places = [Segment(0, own.numel(), k), Segment(own.numel(), own[:1].numel() * last, 1)]
        device = torch.device("cpu")
        search = DigitSearch(places, at, (total, 1), (True, False), exchange, device)
        after, out = torch.zeros(2, dtype=torch.int64), torch.empty_like(x)
        index, counts = search(x.clone(), torch.zeros_like(x), out, after.clone(), after)
        assert torch.equal(out.view(torch.uint8), (x + 0).view(torch.uint8))
        return index, counts, after, exchange.take_traffic(0).sent

    return at, run_in_process(ranks, work)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_ranks_select_what_one_rank_would(ranks, dtype):
    n = 67
    cuts = [0, *sorted(r * r * n // (ranks * ranks) for r in range(1, ranks)), n]
    for x in vectors(n, dtype):
        parts = [x[a:b] for a, b in pairwise(cuts)]
        for k in (1, 20, n - 1, n):
            whole = select.largest(x, [Segment(0, n, k)])
            at, found = searched(parts, k, dtype)
            for rank, (index, counts, after, sent) in enumerate(found):
                own = whole[(whole >= cuts[rank]) & (whole < cuts[rank + 1])] - cuts[rank]
                assert torch.equal(index[: own.numel()], own)
                assert counts[at.index(2 * rank)] == own.numel()
                assert after.tolist() == [int(order_bits(x).sort().values[n - k]), 0]
                load = search_load(2, dtype, ranks)
                assert sent == load.traffic(ranks, 0).sent


def test_many_vectors_are_searched_with_short_digits():
    few, many = (search_load(count, torch.float32, 4).summed / count for count in (8, 9))
    assert (few, many) == (4 * (1 + 4 * 256), 4 * (1 + 8 * 16))
