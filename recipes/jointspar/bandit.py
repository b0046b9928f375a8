"""The two forms of Algorithm 1 on layers with fixed gradient norms that change once.

There are 54 layers with log-normal norms (sigma 1.5), a budget of S = 32.4 layers per step, and
p_min = 0.0125. After 5,000 steps the norms are drawn again. The cost of p is sum |g_d|^2 / p_d. The
paper's form (``Literal``) runs with a grid of step sizes, of which the best is chosen afterwards.
"""

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.experiments import ResultTable, fill
from torchcomp.engine.keys import Key
from torchcomp.jointspar import Bandit, Baseline, Literal, kl_project, sample

LAYERS, SHARE, P_MIN = 54, 0.6, 0.0125
STEPS, QUICK_STEPS = 5000, 200
# Number of steps that one point of the curves averages.
BLOCK = 50
# In units of p_min^3 / L^2, for which the exponent of a kept layer at p_min is about 1.
FORMS = (
    "uniform",
    *(f"baseline, alpha {alpha:g}" for alpha in (0.003, 0.01, 0.03)),
    *(f"literal, alpha {alpha:g}" for alpha in (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)),
)

Curve = NDArray[np.float64]


def open_bandit(arguments: argparse.Namespace) -> Callable[[], None]:
    """Return what computes the missing runs."""
    first = QUICK_STEPS if arguments.quick else STEPS
    last = 2 * first
    table = ResultTable(
        arguments.out / "bandit.csv",
        ("form", "seed"),
        (
            *(f"excess_at_{first}", f"mean_excess_to_{first}", "steps_to_2_percent"),
            *(f"excess_at_{last}", f"mean_excess_from_{first}"),
        ),
        f"{LAYERS} layers, norms change after {first} steps",
        resume=arguments.resume,
        curve=[str(step) for step in range(BLOCK, last + 1, BLOCK)],
    )
    runs = [(form, seed) for seed in arguments.seeds for form in FORMS]
    return lambda: fill(table, runs, partial(measure, steps=first))


def measure(run: tuple[str, int], steps: int) -> tuple[Any, Any]:
    """Return the cells of a run, and its curve: the cost above the optimum, where 0.5 is 50 %."""
    form, seed = run
    excess = excess_of(rule_of(form, seed), seed, steps)
    first, second = np.split(excess, 2)
    within = np.flatnonzero(first < 0.02)
    cells = [
        *(f"{first[-1]:.5f}", f"{first.mean():.5f}"),
        int(within[0]) if within.size else "never",
        *(f"{second[-1]:.5f}", f"{second.mean():.5f}"),
    ]
    return cells, [[f"{mean:.4g}" for mean in excess.reshape(-1, BLOCK).mean(1)]]


def rule_of(form: str, seed: int) -> Baseline | Literal | None:
    """Return the rule that a form's name describes."""
    kind, _, alpha = form.partition(", alpha ")
    if kind == "baseline":
        return Baseline(float(alpha))
    # The paper's form with the tightest valid bound L, and alpha in natural units.
    bound = float(np.max(norms_of(seed)))
    return Literal(float(alpha) * P_MIN**3 / bound**2, bound) if kind == "literal" else None


def norms_of(seed: int) -> tuple[Curve, Curve]:
    """Return the norms before and after the change."""
    rng = np.random.default_rng(seed)
    # Unlike np.exp, math.exp rounds equally on all processors.
    norms = [math.exp(1.5 * value) for value in rng.standard_normal(2 * LAYERS).tolist()]
    return np.array(norms[:LAYERS]), np.array(norms[LAYERS:])


def excess_of(rule: Baseline | Literal | None, seed: int, steps: int) -> Curve:
    """Return the cost above the optimum at every step of one run."""
    bandit = Bandit(np.ones(LAYERS), SHARE * LAYERS, P_MIN, rule)
    excess = []
    for part, norms in enumerate(norms_of(seed)):
        # p of the optimum is clip(const |g_d|, p_min, 1).
        best = kl_project([math.log(norm) for norm in norms.tolist()], SHARE * LAYERS, P_MIN)
        minimum = (norms**2 / best).sum()
        for step in range(part * steps, (part + 1) * steps):
            excess.append((norms**2 / bandit.p).sum() / minimum - 1)
            if rule is not None:
                bandit.update(sample(bandit.p, Key(seed, step)), norms)
    return np.array(excess)


if __name__ == "__main__":
    from recipes.jointspar.experiment import main

    main(["--only", "bandit", *sys.argv[1:]])
