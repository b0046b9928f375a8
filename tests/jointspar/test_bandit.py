"""The bandit and the sampling of JointSpar, compared with plain loops and closed forms."""

import json
import math
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.cases import thorough
from tests.support.patience import PATIENCE
from torchcomp.errors import NonFiniteError, SpecError
from torchcomp.jointspar import (
    Bandit,
    Baseline,
    Literal,
    best_probabilities,
    sample,
)
from torchcomp.keys import Key

D = 54
P_MIN = 0.0125


def layer_norms(seed=0, spread=1.5):
    """Norms that differ by orders of magnitude, as in real networks."""
    return np.exp(spread * np.random.default_rng(seed).standard_normal(D))


def layer_costs(seed=0):
    """Sizes that differ by three orders of magnitude."""
    return 10.0 ** np.random.default_rng(seed + 100).uniform(2, 5, D)


# --- Algorithm 2: unbiased, with the variance that the bandit minimises ---------------------------


@pytest.mark.parametrize("shared", [True, *thorough([False])])
def test_divided_by_p_the_sampled_layers_are_unbiased_with_variance_g2_times_1_over_p_minus_1(
    shared,
):
    draws = 100_000
    g, p = layer_norms(), best_probabilities(layer_norms(), 0.4 * D, P_MIN)
    kept = np.stack([sample(p, Key(7, step, rank=3), shared=shared) for step in range(draws)])
    estimates = np.where(kept, g / p, 0.0)
    variance = g**2 * (1 / p - 1)
    error = np.abs(estimates.mean(0) - g)
    assert (error <= 4 * np.sqrt(variance / draws) + 1e-9 * g).all()
    # The standard error of a sample variance, from the fourth central moment of g / p times a coin.
    fourth = (g / p) ** 4 * p * (1 - p) * (1 - 3 * p * (1 - p))
    spread = np.sqrt(np.maximum(fourth - variance**2, 0) / draws)
    assert (np.abs(estimates.var(0) - variance) <= 4 * spread + 1e-9 * g**2).all()
    # Independent: no pair is correlated by more than 5 standard errors.
    coins = np.corrcoef(kept[:, p < 1].T)
    assert np.abs(coins - np.eye(len(coins))).max() < 5 / math.sqrt(draws)


def test_sizes_of_the_sets_have_mean_s_and_empty_sets_occur():
    p = np.full(6, 0.3)
    sizes = np.array([sample(p, Key(1, step)).sum() for step in range(20_000)])
    assert sizes.mean() == pytest.approx(1.8, abs=4 * math.sqrt(6 * 0.21 / 20_000))
    assert (sizes == 0).mean() == pytest.approx(0.7**6, abs=0.01)
    assert (sizes == 6).any()


def test_a_shared_set_is_the_same_on_all_ranks_and_a_private_one_is_not():
    p = np.full(64, 0.5)
    shared = [sample(p, Key(0, 5, rank=rank)) for rank in range(4)]
    assert all((mask == shared[0]).all() for mask in shared)
    private = [sample(p, Key(0, 5, rank=rank), shared=False) for rank in range(4)]
    assert all((a != b).any() for i, a in enumerate(private) for b in private[:i])
    assert (sample(p, Key(0, 6)) != shared[0]).any()
    assert (sample(p, Key(1, 5)) != shared[0]).any()


def test_a_layer_with_probability_one_is_always_kept():
    assert all(sample(np.ones(5), Key(0, step)).all() for step in range(1000))


# --- The optimum ----------------------------------------------------------------------------------


@pytest.mark.parametrize("with_costs", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_best_probabilities_are_proportional_to_the_norm_over_the_root_of_the_cost(
    share, with_costs
):
    g, c = layer_norms(), layer_costs() if with_costs else np.ones(D)
    p = best_probabilities(g, share * c.sum(), P_MIN, c)
    assert c @ p == pytest.approx(share * c.sum(), rel=1e-12)
    inside = (p > P_MIN * 1.001) & (p < 0.999)
    ratio = p[inside] * np.sqrt(c[inside]) / g[inside]
    assert inside.sum() >= 5
    assert np.ptp(ratio) <= 1e-9 * ratio.mean()


@pytest.mark.parametrize("with_costs", [False, True])
def test_no_feasible_change_lowers_the_variance_of_the_best_probabilities(with_costs):
    g, c = layer_norms(), layer_costs() if with_costs else np.ones(D)
    p = best_probabilities(g, 0.4 * c.sum(), P_MIN, c)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        a, b = rng.choice(D, 2, replace=False)
        moved = p.copy()
        step = 1e-4 * rng.random()
        moved[a] += step / c[a] * c.min()
        moved[b] -= step / c[b] * c.min()
        if moved[a] <= 1 and moved[b] >= P_MIN:
            assert (g**2 / moved).sum() >= (g**2 / p).sum() * (1 - 1e-12)


# --- Algorithm 1 against loops over layers --------------------------------------------------------


def projection(w, costs, budget, p_min):
    """Minimise the divergence by bisection on the factor of w."""
    low, high = 1e-300, 1e300

    def q(factor):
        return [min(1.0, max(p_min, x * factor)) for x in w]

    for _ in range(3000):
        factor = math.sqrt(low) * math.sqrt(high)
        if sum(c * x for c, x in zip(costs, q(factor), strict=True)) < budget:
            low = factor
        else:
            high = factor
    return q(high)


def steps_of(count, seed=3):
    """Yield (kept, norms) of each step. The norms change from step to step."""
    rng = np.random.default_rng(seed)
    for step in range(count):
        yield rng.random(8) < 0.5, np.exp(rng.standard_normal(8)) * (1 + step % 3)


def test_baseline_form_equals_its_four_lines():
    costs, budget, p_min, alpha = [1.0, 2.0, 3.0, 1.0, 5.0, 1.0, 2.0, 4.0], 9.0, 0.05, 0.03
    bandit = Bandit(costs, budget, p_min, Baseline(alpha))
    p = [budget / sum(costs)] * 8
    average, weight = 0.0, 0.0
    for kept, norms in steps_of(40):
        w = []
        for d in range(8):
            r = 0.0
            if kept[d] and weight and average:
                r = norms[d] ** 2 / (costs[d] * p[d] ** 2 * (average / weight)) - 1
            w.append(p[d] * math.exp(min(1.0, max(-1.0, alpha * r / p[d]))))
        seen = sum(norms[d] ** 2 / p[d] ** 2 for d in range(8) if kept[d]) / budget
        average, weight = 0.95 * average + 0.05 * seen, 0.95 * weight + 0.05
        p = projection(w, costs, budget, p_min)
        bandit.update(kept, norms)
        np.testing.assert_allclose(bandit.p, p, rtol=1e-9)
        assert bandit.level == pytest.approx(average / weight, rel=1e-12)
    assert np.ptp(bandit.p) > 0.05


def test_literal_form_equals_its_three_lines():
    alpha, bound, p_min, s = 1e-4, 12.0, 0.1, 3.0
    bandit = Bandit(np.ones(8), s, p_min, Literal(alpha, bound))
    p = [s / 8] * 8
    for kept, norms in steps_of(40):
        w = []
        # One of these norms is above 12, so the bound must grow.
        bound = max(bound, *norms[kept])
        for d in range(8):
            loss = -(norms[d] ** 2) / p[d] ** 2 + bound**2 / p_min**2 if kept[d] else 0.0
            w.append(p[d] * math.exp(-alpha * loss / p[d]))
        p = projection(w, [1.0] * 8, s, p_min)
        bandit.update(kept, norms)
        np.testing.assert_allclose(bandit.p, p, rtol=1e-9)
    assert np.ptp(bandit.p) > 0.05
    assert bound > 12.0


def test_literal_form_without_a_bound_uses_the_largest_norm_seen():
    bounded = Bandit(np.ones(4), 2.0, 0.1, Literal(1e-4, 3.0))
    unbounded = Bandit(np.ones(4), 2.0, 0.1, Literal(1e-4))
    kept = np.array([True, True, False, False])
    for bandit in (bounded, unbounded):
        bandit.update(kept, np.array([3.0, 1.0, 99.0, 0.0]))
    assert unbounded.largest == 3.0
    np.testing.assert_array_equal(bounded.p, unbounded.p)


def test_literal_form_is_correct_at_huge_exponents():
    bandit = Bandit(np.ones(6), 2.0, 0.0125, Literal(1.0, 100.0))
    for step in range(20):
        bandit.update(sample(bandit.p, Key(0, step)), np.full(6, 50.0))
        assert bandit.p.sum() == pytest.approx(2.0, rel=1e-12)
        assert ((bandit.p >= 0.0125) & (bandit.p <= 1)).all()


# --- Learning -------------------------------------------------------------------------------------


def excess(bandit, norms):
    """Return by what share sum |g|^2 / p exceeds its minimum."""
    best = best_probabilities(norms, bandit.budget, bandit.p_min, bandit.costs)
    return (norms**2 / bandit.p).sum() / (norms**2 / best).sum() - 1


def run(bandit, norms, steps, seed=0, start=0):
    for step in range(start, start + steps):
        bandit.update(sample(bandit.p, Key(seed, step)), norms)
    return bandit


@pytest.mark.parametrize("alpha", [0.01, *thorough([0.003, 0.03])])
@pytest.mark.parametrize("share", [0.3, *thorough([0.6])])
def test_reaches_two_per_cent_of_the_optimum_within_5000_steps(alpha, share):
    norms = layer_norms()
    bandit = Bandit(np.ones(D), share * D, P_MIN, Baseline(alpha))
    assert excess(bandit, norms) > 0.3
    assert excess(run(bandit, norms, 5000), norms) < 0.02


def test_with_costs_it_learns_the_norm_over_the_root_of_the_cost():
    norms, costs = layer_norms(), layer_costs()
    bandit = Bandit(costs, 0.4 * costs.sum(), P_MIN)
    assert excess(bandit, norms) > 0.3
    assert excess(run(bandit, norms, 5000), norms) < 0.02
    late = [run(bandit, norms, 1, start=step).p for step in range(5000, 10_000)]
    best = best_probabilities(norms, bandit.budget, P_MIN, costs)
    np.testing.assert_allclose(np.mean(late, 0), best, rtol=0.2, atol=0.02)


def test_follows_a_change_of_norms():
    before, after = layer_norms(0), layer_norms(1)
    bandit = run(Bandit(np.ones(D), 0.4 * D, P_MIN), before, 2000)
    assert excess(bandit, after) > 0.5
    assert excess(run(bandit, after, 4000, start=2000), after) < 0.03


def test_does_not_depend_on_the_unit_of_the_norms_or_the_costs():
    norms, costs = layer_norms(), layer_costs()
    one = run(Bandit(costs, 0.4 * costs.sum(), P_MIN), norms, 200)
    other = run(Bandit(1e6 * costs, 0.4e6 * costs.sum(), P_MIN), 1e-8 * norms, 200)
    np.testing.assert_allclose(one.p, other.p, rtol=1e-6)


# --- Edges, checkpoints and bad input -------------------------------------------------------------


def test_with_the_whole_budget_all_probabilities_stay_one():
    bandit = run(Bandit(np.ones(D), float(D), P_MIN), layer_norms(), 50)
    assert (bandit.p == 1).all()


def test_zero_norms_do_not_change_p():
    bandit = run(Bandit(np.ones(4), 2.0, 0.1), np.zeros(4), 10)
    np.testing.assert_allclose(bandit.p, 0.5)
    run(bandit, np.array([1.0, 0.0, 0.0, 0.0]), 3000, start=10)
    assert bandit.p[0] > 0.9
    assert np.isfinite(bandit.p).all()


def test_an_empty_set_does_not_change_p():
    bandit = run(Bandit(np.ones(D), 20.0, P_MIN), layer_norms(), 100)
    before, level = bandit.p, bandit.level
    bandit.update(np.zeros(D, dtype=bool), np.full(D, np.nan))
    np.testing.assert_allclose(bandit.p, before, rtol=1e-12)
    assert 0 < bandit.level < level


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.0, 1e160])
def test_a_bad_norm_is_refused_and_nothing_changes(bad):
    bandit = run(Bandit(np.ones(4), 2.0, 0.1), np.ones(4), 10)
    before = bandit.state_dict()
    norms = np.array([1.0, 1.0, bad, 1.0])
    with pytest.raises(NonFiniteError, match=rf"\b2\b.*{re.escape(str(bad))}"):
        bandit.update(np.array([True, False, True, False]), norms)
    assert bandit.state_dict() == before
    bandit.update(np.array([True, False, False, True]), norms)


@pytest.mark.parametrize("rule", [Baseline(), Literal(1e-5)])
def test_a_checkpoint_in_json_resumes_bit_for_bit(rule):
    norms = layer_norms()
    whole = run(Bandit(np.ones(D), 20.0, P_MIN, rule), norms, 200)
    half = run(Bandit(np.ones(D), 20.0, P_MIN, rule), norms, 100)
    resumed = Bandit(np.ones(D), 20.0, P_MIN, rule)
    resumed.load_state_dict(json.loads(json.dumps(half.state_dict())))
    np.testing.assert_array_equal(run(resumed, norms, 100, start=100).p, whole.p)
    assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Bandit(np.ones(4), 5.0, 0.1), r"budget 5\b.*\b4\b"),
        (lambda: Bandit(np.ones(4), 0.2, 0.1), r"budget 0\.2\b.*\b0\.4\b.*p_min = 0\.1"),
        (lambda: Bandit([1.0, -1.0], 1.0, 0.1), r"costs.*-1\.0"),
        (lambda: Bandit([1.0, math.nan], 1.0, 0.1), r"costs\[1\].*nan"),
        (lambda: Baseline(0.0), r"alpha.* 0\.0"),
        (lambda: Literal(math.inf), r"alpha.* inf"),
        *(
            (lambda bound=bound: Literal(1.0, bound), rf"bound.*{re.escape(repr(bound))}")
            for bound in (math.nan, math.inf, "big", -3.0, 0.0, True, 1e101)
        ),
        (lambda: Bandit([1.0, 2.0], 1.0, 0.1, Literal(1.0)), "Literal.*costs"),
        (lambda: best_probabilities([1.0, 0.0], 1.0, 0.1), r"norms.* 0\.0"),
    ],
)
def test_bad_input_is_refused(build, message):
    with pytest.raises(SpecError, match=message):
        build()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"p": [0.5] * 3}, r"p\b.*\b4\b.*\b3\b"),
        ({"p": [math.nan] * 4}, r"p\[0\].*nan"),
        ({"p": [7.0] * 4}, r"p\[0\].*7\.0.*0\.1.*1"),
        ({"p": [0.9] * 4}, r"p\b.*3\.6.*budget.*2"),
        ({"p": None}, r"p\b.*1-D.*\(\)"),
        ({"largest": "big"}, r"largest.*'big'"),
        ({"largest": 1e300}, r"largest.*1e\+300.*1e\+100"),
        ({"average": math.inf}, r"average.*inf"),
        ({"updates": 1.5}, r"updates.*1\.5"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage, message):
    bandit = run(Bandit(np.ones(4), 2.0, 0.1), np.ones(4), 10)
    before = bandit.state_dict()
    with pytest.raises(SpecError, match=message):
        bandit.load_state_dict({**before, "largest": 9.0, **damage})
    assert bandit.state_dict() == before
    with pytest.raises(SpecError, match="p, updates"):
        bandit.load_state_dict({"largest": 1.0, "average": 0.0})


# --- The same numbers everywhere ------------------------------------------------------------------


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
