"""The two forms of Algorithm 1 on layers with fixed gradient norms that change once.

There are 54 layers with log-normal norms (sigma 1.5), a budget of S = 32.4 layers per step, and
p_min = 0.0125. The cost of p is sum |g_d|^2 / p_d. Half-way, the norms are drawn again.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.experiments import ResultTable, fill
from recipes.rows import columns
from torchcomp.engine.keys import Key
from torchcomp.jointspar import Bandit, Baseline, Literal, sample
from torchcomp.reference import best_probabilities

LAYERS, SHARE, P_MIN = 54, 0.6, 0.0125
STEPS, QUICK_STEPS = 5000, 200
BLOCK = 50
"""Number of steps that one point of the curves averages."""
ALPHAS = (0.003, 0.01, 0.03)
# In units of p_min^3 / L^2, for which the exponent of a kept layer at p_min is about 1.
LITERAL_ALPHAS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)
FORMS = (
    "uniform",
    *(f"baseline, alpha {alpha:g}" for alpha in ALPHAS),
    *(f"literal, alpha {alpha:g}" for alpha in LITERAL_ALPHAS),
)
Curve = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    form: str
    seed: int


def open_bandit(arguments: argparse.Namespace) -> Callable[[], None]:
    steps = QUICK_STEPS if arguments.quick else STEPS
    table = ResultTable(
        arguments.out / "bandit.csv",
        columns(Run),
        (
            *(f"excess_at_{steps}", f"mean_excess_to_{steps}", "steps_to_2_percent"),
            *(f"excess_at_{2 * steps}", f"mean_excess_from_{steps}"),
        ),
        f"{LAYERS} layers, norms change after {steps} steps",
        resume=arguments.resume,
        curve=[str(step) for step in range(BLOCK, 2 * steps + 1, BLOCK)],
    )
    runs = [Run(form, seed) for seed in arguments.seeds for form in FORMS]
    return lambda: fill(table, runs, partial(measure, steps=steps), arguments.processes)


def measure(run: Run, steps: int) -> tuple[list[Any], list[list[str]]]:
    """Return the cells of a run and its curve."""
    excess = excess_costs(rule_of(run), run.seed, steps)
    first, second = np.split(excess, 2)
    within = np.flatnonzero(first < 0.02)
    cells = [
        *(f"{first[-1]:.5f}", f"{first.mean():.5f}", int(within[0]) if within.size else "never"),
        *(f"{second[-1]:.5f}", f"{second.mean():.5f}"),
    ]
    return cells, [[f"{mean:.4g}" for mean in excess.reshape(-1, BLOCK).mean(1)]]


def rule_of(run: Run) -> Baseline | Literal | None:
    """Return the rule that a form names; the paper's has the tightest valid bound L."""
    kind, _, alpha = run.form.partition(", alpha ")
    if kind == "literal":
        bound = float(np.max(norms_of(run.seed)))
        return Literal(float(alpha) * P_MIN**3 / bound**2, bound)
    return Baseline(float(alpha)) if alpha else None


def norms_of(seed: int) -> list[Curve]:
    """Return the norms before and after the change."""
    # Unlike np.exp, math.exp rounds equally on all processors.
    drawn = np.random.default_rng(seed).standard_normal((2, LAYERS))
    return [np.array([math.exp(1.5 * value) for value in part]) for part in drawn.tolist()]


def excess_costs(rule: Baseline | Literal | None, seed: int, steps: int) -> Curve:
    """Return the cost above the optimum at every step of one run; 0.5 is 50 %."""
    budget = SHARE * LAYERS
    bandit = Bandit(np.ones(LAYERS), budget, P_MIN, rule)
    excess = []
    for part, norms in enumerate(norms_of(seed)):
        best = best_probabilities(norms.tolist(), budget, P_MIN, [1.0] * LAYERS)
        least = (norms**2 / np.array(best)).sum()
        for step in range(part * steps, (part + 1) * steps):
            excess.append((norms**2 / bandit.p).sum() / least - 1)
            if rule is not None:
                bandit.update(sample(bandit.p, Key(seed, step)), norms)
    return np.array(excess)
