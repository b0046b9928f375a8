"""The bandit and the sampling of JointSpar, compared with the paper and with closed forms."""

import json
import math
import os
import platform
import subprocess
import sys
from decimal import Decimal, localcontext
from pathlib import Path

import numpy as np
import pytest

from tests.support.patience import PATIENCE
from torchcomp import reference
from torchcomp.engine.keys import Key
from torchcomp.jointspar import Bandit, Baseline, Literal, kl_project, sample

D = 54
P_MIN = 0.0125


def layer_norms(seed=0):
    """Norms that differ by orders of magnitude, as in real networks."""
    return np.exp(1.5 * np.random.default_rng(seed).standard_normal(D))


def best(norms, bandit):
    p = reference.best_probabilities(norms, bandit.budget, bandit.p_min, bandit.costs)
    return np.array(p)


def test_divided_by_p_the_sampled_layers_are_unbiased_and_independent():
    draws = 50_000
    g = layer_norms()
    p = best(g, Bandit(np.ones(D), 0.4 * D, P_MIN))
    kept = np.stack([sample(p, Key(7, step, rank=3)) for step in range(draws)])
    estimates = np.where(kept, g / p, 0.0)
    variance = g**2 * (1 / p - 1)
    error = np.abs(estimates.mean(0) - g)
    assert (error <= 4 * np.sqrt(variance / draws) + 1e-9 * g).all()
    # No pair is correlated by more than 5 standard errors.
    coins = np.corrcoef(kept[:, p < 1].T)
    assert np.abs(coins - np.eye(len(coins))).max() < 5 / math.sqrt(draws)


def test_a_shared_set_is_the_same_on_all_ranks_and_a_private_one_is_not():
    p = np.full(64, 0.5)
    shared = [sample(p, Key(0, 5, rank=rank)) for rank in range(4)]
    assert all((mask == shared[0]).all() for mask in shared)
    private = [sample(p, Key(0, 5, rank=rank), shared=False) for rank in range(4)]
    others = [*private, sample(p, Key(0, 6)), sample(p, Key(1, 5)), shared[0]]
    assert all((a != b).any() for i, a in enumerate(others) for b in others[:i])
    assert sample(np.ones(1000), Key(0)).all()


def run(bandit, norms, steps, seed=0, start=0):
    for step in range(start, start + steps):
        bandit.update(sample(bandit.p, Key(seed, step)), norms)
    return bandit


def test_edges():
    assert (run(Bandit(np.ones(D), float(D), P_MIN), layer_norms(), 50).p == 1).all()
    silent = run(Bandit(np.ones(4), 2.0, 0.1), np.zeros(4), 10)
    np.testing.assert_allclose(silent.p, 0.5)
    assert run(silent, np.array([1.0, 0.0, 0.0, 0.0]), 3000, start=10).p[0] > 0.9
    for rule in (Baseline(), Literal(1.0, 100.0)):  # huge norms and huge exponents
        huge = run(Bandit(np.ones(4), 2.0, 0.1, rule), np.array([1e160, 50.0, 1.0, 1.0]), 20)
        assert huge.p.sum() == pytest.approx(2.0, rel=1e-12)
    empty = run(Bandit(np.ones(D), 20.0, P_MIN), layer_norms(), 100)
    before, level = empty.p, empty.level
    empty.update(np.zeros(D, dtype=bool), np.full(D, np.nan))
    np.testing.assert_allclose(empty.p, before, rtol=1e-12)
    assert 0 < empty.level < level


def learned():
    """The state of a bandit after some steps, as text with all digits."""
    rng = np.random.default_rng(0)
    bandit = Bandit(rng.uniform(0.5, 2.0, 20), 10.0, P_MIN, Baseline(0.03))
    for step in range(200):
        bandit.update(sample(bandit.p, Key(0, step)), rng.uniform(0.1, 5.0, 20))
    return json.dumps(bandit.state_dict())


def test_ranks_on_different_processors_learn_the_same_p():
    # NumPy and its BLAS without the vector instructions that they choose here.
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    older = {"NPY_DISABLE_CPU_FEATURES": " ".join(found)}
    if platform.machine() == "x86_64":
        older["OPENBLAS_CORETYPE"] = "Nehalem"
    program = f"from {__name__} import learned; print(learned(), end='')"
    options = {"env": {**os.environ, **older}, "cwd": Path(__file__).parents[2]}
    options |= {"check": True, "capture_output": True, "text": True, "timeout": PATIENCE}
    assert subprocess.run([sys.executable, "-c", program], **options).stdout == learned()


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


def drawn(size, scale, seed=0):
    return scale * np.random.default_rng(seed).standard_normal(size)


PRICES = 10.0 ** np.random.default_rng(1).uniform(0, 6, 40)
CASES = {
    "ties in the middle": ([0.0, 1.0, 1.0, 1.0, 2.0, 2.0], 2.5, 0.05),
    "huge exponents": (drawn(54, 1e5), 27.0, 0.0125),
    "both bounds": ([1e5, -1e5, 0.0, 0.5, 1e5], 3.0, 1e-6),
    "tiny p_min": (drawn(30, 10.0), 5.0, 1e-300),
    "little for costs": (drawn(40, 1.0), 0.05 * PRICES.sum(), 0.01, PRICES),
    "much for costs": (drawn(40, 1e5), 0.9 * PRICES.sum(), 0.01, PRICES),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_a_bisection_in_60_digits(case):
    u, budget, p_min, costs = (*case, np.ones(len(case[0])))[:4]
    q = kl_project(u, budget, p_min, costs)
    np.testing.assert_allclose(q, brute_force(u, budget, p_min, costs), rtol=0, atol=1e-10)
    assert costs @ q == pytest.approx(budget, rel=1e-12)
