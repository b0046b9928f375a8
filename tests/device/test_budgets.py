"""Launches and host waits of every method on a simulated device, among 2, 8 and 64 ranks."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.budgets import BUDGETS, Budget
from tests.support.cases import only, some
from tests.support.launches import one_bucket

PAGE = Path(__file__).parents[2] / "docs" / "cuda.md"
METHODS = [(spec.format(ratio=0.01), budget) for spec, budget in BUDGETS.items()]

# Several tests look at the same buckets.
costs = cache(one_bucket)


@pytest.mark.parametrize("ranks", only([2, 8, 64], now=[8, 64]))
@pytest.mark.parametrize(("spec", "budget"), METHODS, ids=[spec for spec, _ in METHODS])
def test_a_bucket_costs_at_most_its_budget(spec: str, budget: Budget, ranks: int) -> None:
    per_bucket, per_step = costs(spec, ranks)
    assert per_bucket.waits <= budget.waits, per_bucket
    assert per_step.waits <= budget.waits_per_step, per_step
    assert per_bucket.launches <= budget.launches_among(ranks), per_bucket
    assert per_step.launches <= 20, per_step


@pytest.mark.parametrize("dtype", some([torch.bfloat16, torch.float16, torch.float64], of=3))
@pytest.mark.parametrize(("spec", "budget"), METHODS[::2], ids=[spec for spec, _ in METHODS[::2]])
def test_other_dtypes_wait_no_more(spec: str, budget: Budget, dtype: torch.dtype) -> None:
    per_bucket, per_step = one_bucket(spec, 8, dtype=dtype)
    assert per_bucket.waits <= budget.waits, per_bucket
    assert per_step.waits <= budget.waits_per_step, per_step


@pytest.mark.parametrize("spec", ["ef(topk(0.01, scope='tensor'))", "powersgd(rank=2)"])
def test_other_methods_do_not_wait_for_a_bucket(spec: str) -> None:
    per_bucket, per_step = one_bucket(spec, 8)
    assert per_bucket.waits == 0, per_bucket
    assert per_step.waits == 1, per_step


def test_the_page_has_these_numbers() -> None:
    rows = re.findall(r"^\| `(.+)` ((?:\| \d+ )+)\|$", PAGE.read_text(), flags=re.M)
    assert len(rows) > 5
    for spec, cells in rows:
        eight, many = (costs(spec, ranks) for ranks in (8, 64))
        counted = [eight[0].waits, eight[1].waits, eight[0].launches, many[0].launches]
        assert [int(cell) for cell in cells.split("|")[1:]] == counted, spec
