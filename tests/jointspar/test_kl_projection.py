"""kl_project compared with a bisection in 60 decimal digits; optimality conditions; bad input."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcomp.errors import SpecError
from torchcomp.jointspar import kl_project


def brute_force(u, budget, p_min, costs=None, digits=60):
    """Find tau by bisection over the real numbers, in decimal arithmetic."""
    with localcontext() as context:
        context.prec = digits
        logs = [Decimal(float(x)) for x in u]
        prices = [Decimal(float(c)) for c in (costs if costs is not None else np.ones(len(u)))]
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


def check_optimal(q, u, budget, p_min, costs=None, tolerance=1e-10):
    """Check the conditions of Karush, Kuhn and Tucker, which only the minimiser satisfies."""
    u = np.asarray(u, dtype=np.longdouble)
    costs = np.ones(len(u)) if costs is None else np.asarray(costs)
    assert ((q >= p_min) & (q <= 1)).all()
    assert float(costs @ q) == pytest.approx(budget, rel=tolerance)
    # Inside the bounds, log q = u + tau. At a bound, the unclipped value lies beyond it.
    tau = np.log(q.astype(np.longdouble)) - u
    inside = (q > p_min * (1 + 1e-9)) & (q < 1 - 1e-9)
    middle = (
        tau[inside].mean()
        if inside.any()
        else np.clip(0, tau[q >= 1].max(initial=-np.inf), tau[q < 1].min(initial=np.inf))
    )
    assert (np.abs(tau[inside] - middle) <= 1e-9).all()
    assert (tau[~inside & (q > 0.5)] <= middle + 1e-9).all()
    assert (tau[~inside & (q <= 0.5)] >= middle - 1e-9).all()


def drawn(size, scale, seed=0):
    return scale * np.random.default_rng(seed).standard_normal(size)


CASES = {
    "one entry": ([3.0], 0.4, 0.1),
    "two equal": ([5.0, 5.0], 1.0, 0.01),
    "all equal": ([1e5] * 54, 27.0, 0.0125),
    "ties in the middle": ([0.0, 1.0, 1.0, 1.0, 2.0, 2.0], 2.5, 0.05),
    "small": (drawn(7, 1.0), 3.0, 0.1),
    "layers of a ResNet": (drawn(54, 2.0), 32.4, 0.0125),
    "wide": (drawn(54, 40.0), 16.2, 0.0125),
    "huge exponents": (drawn(54, 1e5), 27.0, 0.0125),
    "huge and close": (1e5 + drawn(54, 1.0), 27.0, 0.0125),
    "huge and negative": (-1e5 + drawn(54, 1.0), 27.0, 0.0125),
    "both bounds": ([1e5, -1e5, 0.0, 0.5, 1e5], 3.0, 1e-6),
    "all at one": (drawn(9, 3.0), 9.0, 0.2),
    "all at p_min": (drawn(9, 3.0), 1.8, 0.2),
    "just above p_min": (drawn(9, 3.0), 1.8 + 1e-9, 0.2),
    "tiny p_min": (drawn(30, 10.0), 5.0, 1e-300),
}


@pytest.mark.parametrize(("u", "budget", "p_min"), CASES.values(), ids=CASES)
def test_equals_a_bisection_in_60_digits(u, budget, p_min):
    q = kl_project(u, budget, p_min)
    np.testing.assert_allclose(q, brute_force(u, budget, p_min), rtol=0, atol=1e-10)
    assert q.sum() == pytest.approx(budget, rel=1e-12)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e5])
def test_equals_the_bisection_with_costs(scale):
    rng = np.random.default_rng(1)
    u, costs = scale * rng.standard_normal(40), 10.0 ** rng.uniform(0, 6, 40)
    for share in (0.05, 0.3, 0.9):
        budget = share * costs.sum()
        q = kl_project(u, budget, 0.01, costs)
        np.testing.assert_allclose(q, brute_force(u, budget, 0.01, costs), rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 10, 100, 1000, 10_000])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e5])
def test_is_optimal_for_up_to_ten_thousand_layers(size, scale):
    u = drawn(size, scale, seed=size)
    for share in (0.013, 0.5, 0.99):
        check_optimal(kl_project(u, share * size, 0.0125), u, share * size, 0.0125)


def test_ten_thousand_layers_equal_the_bisection_in_80_bits():
    u, budget, p_min = drawn(10_000, 3.0), 4000.0, 0.0125
    if np.finfo(np.longdouble).eps > 1e-18:
        pytest.skip("this machine's long double is no wider than a double")
    low, high = np.longdouble(np.log(p_min) - u.max()), np.longdouble(-u.min())
    for _ in range(100):
        tau = (low + high) / 2
        enough = np.clip(np.exp(u.astype(np.longdouble) + tau), p_min, 1).sum() >= budget
        low, high = (low, tau) if enough else (tau, high)
    expected = np.clip(np.exp(u + high), p_min, 1)
    np.testing.assert_allclose(kl_project(u, budget, p_min), expected, rtol=0, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e5, 1e5), min_size=1, max_size=12),
    st.floats(0.0, 1.0),
    st.floats(1e-6, 0.9),
)
def test_any_weights(u, share, p_min):
    budget = len(u) * (p_min + share * (1 - p_min))
    q = kl_project(u, budget, p_min)
    np.testing.assert_allclose(q, brute_force(u, budget, p_min), rtol=0, atol=1e-10)


def test_a_point_of_the_set_is_its_own_projection():
    p = np.array([1.0, 0.3, 0.7, 0.05, 0.05])
    np.testing.assert_allclose(kl_project(np.log(p), p.sum(), 0.05), p, rtol=0, atol=1e-15)


def test_no_other_point_of_the_set_is_nearer():
    rng = np.random.default_rng(2)
    u, costs = rng.standard_normal(6), rng.uniform(1, 9, 6)
    q = kl_project(u, 12.0, 0.05, costs)

    def divergence(x):
        return costs @ (x * (np.log(x) - u) - x)

    for _ in range(1000):
        other = kl_project(rng.standard_normal(6), 12.0, 0.05, costs)
        assert divergence(other) >= divergence(q) - 1e-12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.0] * 4, 4.5, 0.1), r"budget 4\.5\b.*\b4\b"),
        (([0.0] * 4, 0.3, 0.1), r"budget 0\.3\b.*\b0\.4\b.*p_min = 0\.1"),
        (([0.0] * 4, 0.0, 0.1), r"budget.* 0\.0"),
        (([0.0] * 4, float("nan"), 0.1), r"budget.*nan"),
        (([0.0] * 4, 2.0, 0.0), r"p_min.* 0\.0"),
        (([0.0] * 4, 2.0, 1.5), r"p_min.*1\.5"),
        (([0.0, float("inf")], 1.0, 0.1), r"u\[1\].*inf"),
        (([], 1.0, 0.1), r"u\b.*1-D.*\(0,\)"),
        (("a", 1.0, 0.1), r"u\b.*'a'"),
        (([1 + 1j, 2.0], 1.0, 0.1), r"u\b.*'complex'"),
        (([[0.0]], 1.0, 0.1), r"u\b.*1-D.*\(1, 1\)"),
        (([0.0] * 2, 1.0, 0.1, [1.0]), r"costs.*\b2\b.*\b1\b"),
        (([0.0] * 2, 1.0, 0.1, [1.0, 0.0]), r"costs.* 0\.0"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(SpecError, match=message):
        kl_project(*arguments)
