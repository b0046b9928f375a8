"""The bandit and the sampling of JointSpar, compared with the paper and with closed forms."""

import json
import math
import os
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support.cases import thorough
from tests.support.patience import PATIENCE
from torchcomp import reference
from torchcomp.engine.keys import Key
from torchcomp.jointspar import Bandit, Baseline, Literal, sample
from torchcomp.specs.errors import CheckpointError, SpecError

D = 54
P_MIN = 0.0125


def layer_norms(seed=0):
    """Norms that differ by orders of magnitude, as in real networks."""
    return np.exp(1.5 * np.random.default_rng(seed).standard_normal(D))


def layer_costs():
    """Sizes that differ by three orders of magnitude."""
    return 10.0 ** np.random.default_rng(100).uniform(2, 5, D)


def best(norms, bandit):
    p = reference.best_probabilities(norms, bandit.budget, bandit.p_min, bandit.costs)
    return np.array(p)


# --- Algorithm 2: unbiased, with the variance that the bandit minimises ---------------------------


@pytest.mark.parametrize("shared", [True, *thorough([False])])
def test_divided_by_p_the_sampled_layers_are_unbiased_and_independent(shared):
    draws = 50_000
    g = layer_norms()
    p = best(g, Bandit(np.ones(D), 0.4 * D, P_MIN))
    kept = np.stack([sample(p, Key(7, step, rank=3), shared=shared) for step in range(draws)])
    estimates = np.where(kept, g / p, 0.0)
    variance = g**2 * (1 / p - 1)
    error = np.abs(estimates.mean(0) - g)
    assert (error <= 4 * np.sqrt(variance / draws) + 1e-9 * g).all()
    # The standard error of a sample variance, from the fourth central moment of g / p times a coin.
    fourth = (g / p) ** 4 * p * (1 - p) * (1 - 3 * p * (1 - p))
    spread = np.sqrt(np.maximum(fourth - variance**2, 0) / draws)
    assert (np.abs(estimates.var(0) - variance) <= 4 * spread + 1e-9 * g**2).all()
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


# --- Algorithm 1 ----------------------------------------------------------------------------------

COSTS = [1.0, 2.0, 3.0, 1.0, 5.0, 1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("rule", "update", "costs", "budget"),
    [
        (Baseline(0.03), partial(reference.baseline, 0.03, 9.0, 0.1, COSTS), COSTS, 9.0),
        # One of these norms is above 12, so the bound must grow.
        (Literal(1e-4, 12.0), partial(reference.literal, 1e-4, 3.0, 0.1, 12.0), [1.0] * 8, 3.0),
        (Literal(1e-4), partial(reference.literal, 1e-4, 3.0, 0.1), [1.0] * 8, 3.0),
    ],
)
def test_equals_the_reference(rule, update, costs, budget):
    bandit, rng, update = Bandit(costs, budget, 0.1, rule), np.random.default_rng(3), update()
    p = [budget / sum(costs)] * 8
    for step in range(40):
        kept, norms = rng.random(8) < 0.5, np.exp(rng.standard_normal(8)) * (1 + step % 3)
        p = update(p, kept, norms)
        bandit.update(kept, np.where(kept, norms, np.nan))
        np.testing.assert_allclose(bandit.p, p, rtol=1e-9)
    assert np.ptp(bandit.p) > 0.05
    assert bandit.largest > 12


def excess(bandit, norms):
    """Return by what share sum |g|^2 / p exceeds its minimum."""
    return (norms**2 / bandit.p).sum() / (norms**2 / best(norms, bandit)).sum() - 1


def run(bandit, norms, steps, seed=0, start=0):
    for step in range(start, start + steps):
        bandit.update(sample(bandit.p, Key(seed, step)), norms)
    return bandit


@pytest.mark.parametrize("alpha", [0.01, *thorough([0.003, 0.03])])
@pytest.mark.parametrize("costs", [np.ones(D), layer_costs()], ids=["layers", "costs"])
def test_reaches_two_per_cent_of_the_optimum_and_follows_a_change_of_norms(alpha, costs):
    norms, later = layer_norms(), layer_norms(1)
    bandit = Bandit(costs, 0.4 * costs.sum(), P_MIN, Baseline(alpha))
    assert excess(bandit, norms) > 0.3
    assert excess(run(bandit, norms, 5000), norms) < 0.02
    assert excess(bandit, later) > 0.5
    assert excess(run(bandit, later, 4000, start=5000), later) < 0.03


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


# --- Checkpoints and bad input --------------------------------------------------------------------


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
    "damage",
    [
        {"p": [0.5] * 3},
        {"p": [math.nan] * 4},
        {"p": [7.0] * 4},
        {"p": [0.01, 0.99, 0.5, 0.5]},
        {"p": [0.9] * 4},
        {"p": None},
        {"largest": "big"},
        {"largest": 1e300},
        {"average": math.inf},
        {"average": -1.0},
        {"updates": 1.5},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage):
    bandit = run(Bandit(np.ones(4), 2.0, 0.1), np.ones(4), 10)
    before = bandit.state_dict()
    with pytest.raises(CheckpointError, match=next(iter(damage))):
        bandit.load_state_dict({**before, "largest": 9.0, **damage})
    assert bandit.state_dict() == before


@pytest.mark.parametrize(
    ("rule", "options", "field"),
    [
        (Baseline, {"alpha": 0.0}, "alpha"),
        (Literal, {"alpha": math.inf}, "alpha"),
        (Literal, {"alpha": 1.0, "bound": -3.0}, "bound"),
        (Literal, {"alpha": 1.0, "bound": "big"}, "bound"),
    ],
)
def test_bad_rules_are_refused(rule, options, field):
    with pytest.raises(SpecError) as caught:
        rule(**options)
    assert caught.value.field == field


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
