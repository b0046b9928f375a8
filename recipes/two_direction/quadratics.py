"""Quadratics f_i(x) = 1/2 x'Sx - b_i'x with eigenvalues spaced evenly in log from 1/kappa to 1.

The part ``winners`` shows which method sends least, by condition number, omega, number of workers
and price. Messages have K values in both directions, so omega = d/K - 1 and alpha = K/d. A run
gives its cost at every price r of the downlink. Step sizes are tuned for r = 1/2: an iteration
costs the same with each of them, so the same one is best at every r.
"""

import argparse
import math

import torch
from torch import Tensor

from recipes.experiments import ResultTable
from recipes.two_direction.contest import Measure, checked
from recipes.two_direction.methods import Messages, Problem
from recipes.two_direction.race import OUTCOME, RUN, Race, Setting
from torchcomp.two_direction.method import Gradients

D = 60
FALL = 1e-4
"""A run ends when f - f* has fallen to this share of its value at the start."""
MAP_PRICES = (0.0, 0.5, 1.0)
"""The values of r."""
_TASK = f"quadratics of {D} dimensions, f - f* to {FALL:g} of its start"
_KAPPAS = (10.0, 100.0, 1e3, 1e4)
_KS = (30, 6, 3)
_WORKERS = (4, 64)
_MAP_METHODS = ("AGD, three sequences", "AGD", "2Direction", "EF21-P + DIANA")


class Quadratics:
    """The mean of n quadratics of d dimensions with L = Lmax = 1 and mu = 1/kappa, as a Problem.

    The seed draws the b_i. Their mean does not depend on n.
    """

    def __init__(self, kappa: float, n: int, seed: int, d: int = D) -> None:
        self.n, self.d, self.mu = n, d, 1 / kappa
        generator = torch.Generator().manual_seed(seed)
        self.mean = torch.randn(d, dtype=torch.float64, generator=generator)
        own = torch.randn(n, d, dtype=torch.float64, generator=generator)
        self.b = self.mean + own - own.mean(0)
        self.s = torch.logspace(-math.log10(kappa), 0, d, dtype=torch.float64)
        self.start = float((self.mean.square() / self.s).sum())

    def gradients(self, workers: range) -> Gradients:
        """Return the function that evaluates the gradients of these workers."""
        b = self.b[workers.start : workers.stop]
        return lambda x: self.s * x - b

    def value(self, x: Tensor) -> float:
        """Return f(x) - f*, relative to its value at x = 0."""
        return float((self.s * (x - self.mean / self.s).square()).sum()) / self.start


def setting(kappa: float, n: int, sent: Messages, budget: int, powers: range) -> Setting:
    """Return a race on quadratics whose vectors b_i are drawn from the seed."""

    def case(seed: int) -> tuple[Problem, float]:
        return Quadratics(kappa, n, seed), 0.0

    return Setting("quadratics", case, n, 1 / kappa, sent, FALL, budget, powers)


def open_winners(arguments: argparse.Namespace) -> Measure:
    """Return what measures the map of winners."""
    quick = arguments.quick
    kappas, ks = (_KAPPAS[:2], _KS[:2]) if quick else (_KAPPAS, _KS)
    races: list[Race] = [
        # Up to 1.6 times what AGD with three sequences needs, and 1.9 to 2.3 times what AGD needs.
        # 2Direction's uplink is two fifths of its total and AGD's a half, so a run beyond the
        # budget has lost at every price.
        (
            setting(kappa, n, Messages(k, k), round(1200 * math.sqrt(kappa)), range(-6, 7)),
            # The iterations of EF21-P + DIANA grow with kappa, those of AGD with its root.
            # Everywhere, it has lost at the second largest kappa.
            _MAP_METHODS if kappa < max(_KAPPAS) else _MAP_METHODS[:-1],
        )
        for n in (_WORKERS[:1] if quick else _WORKERS)
        for kappa in kappas
        for k in ks
    ]
    path = arguments.out / "winners.csv"
    table = ResultTable(path, RUN, OUTCOME, _TASK, resume=arguments.resume)
    return checked([(table, races)], arguments)
