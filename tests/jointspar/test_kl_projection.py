"""kl_project compared with a bisection in 60 decimal digits; optimality; bad input."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcomp.jointspar import kl_project
from torchcomp.specs.errors import SpecError


def brute_force(u, budget, p_min, costs):
    """Find tau by bisection over the real numbers, in decimal arithmetic."""
    with localcontext() as context:
        context.prec = 60
        logs, prices = ([Decimal(float(x)) for x in values] for values in (u, costs))
        least, target = Decimal(p_min), Decimal(budget)
        floor = least.ln()

        def q(tau):
            return [
                least if x + tau <= floor else Decimal(1) if x + tau >= 0 else (x + tau).exp()
                for x in logs
            ]

        low, high = floor - max(logs), -min(logs)
        for _ in range(170):
            tau = (low + high) / 2
            if sum(c * p for c, p in zip(prices, q(tau), strict=True)) < target:
                low = tau
            else:
                high = tau
        return np.array([float(p) for p in q(high)])


def check(u, budget, p_min, costs=None):
    q = kl_project(u, budget, p_min, costs)
    costs = np.ones(len(u)) if costs is None else costs
    np.testing.assert_allclose(q, brute_force(u, budget, p_min, costs), rtol=0, atol=1e-10)
    assert costs @ q == pytest.approx(budget, rel=1e-12)


def drawn(size, scale, seed=0):
    return scale * np.random.default_rng(seed).standard_normal(size)


CASES = {
    "ties in the middle": ([0.0, 1.0, 1.0, 1.0, 2.0, 2.0], 2.5, 0.05),
    "layers of a ResNet": (drawn(54, 2.0), 32.4, 0.0125),
    "huge exponents": (drawn(54, 1e5), 27.0, 0.0125),
    "huge and close": (-1e5 + drawn(54, 1.0), 27.0, 0.0125),
    "both bounds": ([1e5, -1e5, 0.0, 0.5, 1e5], 3.0, 1e-6),
    "all at one": (drawn(9, 3.0), 9.0, 0.2),
    "just above p_min": (drawn(9, 3.0), 1.8 + 1e-9, 0.2),
    "tiny p_min": (drawn(30, 10.0), 5.0, 1e-300),
    "many": (drawn(400, 3.0), 4.0 + 0.0125 * 400, 0.0125),
}


@pytest.mark.parametrize(("u", "budget", "p_min"), CASES.values(), ids=CASES)
def test_equals_a_bisection_in_60_digits(u, budget, p_min):
    check(u, budget, p_min)


@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_equals_the_bisection_with_costs(scale):
    costs = 10.0 ** np.random.default_rng(1).uniform(0, 6, 40)
    for share in (0.05, 0.3, 0.9):
        check(drawn(40, scale, 1), share * costs.sum(), 0.01, costs)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-1e5, 1e5), min_size=1, max_size=12),
    st.floats(0.0, 1.0),
    st.floats(1e-6, 0.9),
)
def test_any_weights(u, share, p_min):
    check(u, len(u) * (p_min + share * (1 - p_min)), p_min)


@pytest.mark.parametrize(
    "arguments",
    [
        ([0.0] * 4, 4.5, 0.1),
        ([0.0] * 4, 0.3, 0.1),
        ([0.0] * 4, float("nan"), 0.1),
        ([0.0] * 4, 2.0, 0.0),
        ([0.0] * 4, 2.0, 1.5),
        ([0.0, float("inf")], 1.0, 0.1),
        ([0.0] * 2, 1.0, 0.1, [2.0, 0.0]),
    ],
)
def test_bad_input_is_refused(arguments):
    with pytest.raises(SpecError, match="budget") as caught:
        kl_project(*arguments)
    assert caught.value.field == "budget"
