"""Quadratics f_i(x) = 1/2 x'Sx - b_i'x with eigenvalues spaced evenly in log from 1/kappa to 1.

* ``winners``: which method sends least, by condition number, omega, number of workers and price.
  Messages have K values in both directions, so omega = d/K - 1 and alpha = K/d. A run gives its
  cost at every price r of the downlink. Step sizes are tuned for r = 1/2: an iteration costs the
  same with each of them, so the same one is best at every r.
* ``scaling``: iterations by condition number, by omega, by number of workers. All methods of a
  sweep have the same points.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recipes.experiments import ResultTable
from recipes.rows import Row
from recipes.spread import Spread, spread
from recipes.two_direction.contest import Measure, checked
from recipes.two_direction.methods import Messages, Problem
from recipes.two_direction.race import OUTCOME, RUN, Race, Setting, shared_by
from torchcomp.algorithms.method import Gradients

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
# Large enough for every run: a sweep without a result at one point is useless.
_NO_LIMIT = 10**9
# Up to 1/L. With larger steps, 2Direction is faster with some seeds and diverges with others.
_SWEEP_POWERS = range(-7, 1)


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
    return _open("winners", races, arguments)


def _open(name: str, races: list[Race], arguments: argparse.Namespace) -> Measure:
    path = arguments.out / f"{name}.csv"
    table = ResultTable(path, RUN, OUTCOME, _TASK, resume=arguments.resume)
    return checked([(table, races)], arguments)


@dataclass(frozen=True)
class Point:
    """One point of a sweep."""

    kappa: float = 100.0
    n: int = 4
    k_up: int = 12
    k_down: int = 12

    @property
    def omega(self) -> float:
        """Relative variance of the uplink compressor."""
        return D / self.k_up - 1

    @property
    def alpha(self) -> float:
        """Contraction of the downlink compressor."""
        return self.k_down / D

    @property
    def setting(self) -> Setting:
        """The race at this point."""
        sent = Messages(self.k_up, self.k_down)
        return setting(self.kappa, self.n, sent, _NO_LIMIT, _SWEEP_POWERS)


# Iterations of the papers' theorems, without logarithm and constant.
THEORY: dict[str, Callable[[Point], float]] = {
    "2Direction": lambda at: (
        math.sqrt(at.kappa * (at.omega + 1) / at.alpha)
        + math.sqrt(at.kappa * at.omega**2 / at.n)
        + 1 / at.alpha
        + at.omega
    ),
    "AGD": lambda at: math.sqrt(at.kappa),
    "EF21-P + DIANA": lambda at: at.kappa / at.alpha + at.kappa * at.omega / at.n + at.omega,
}


@dataclass(frozen=True)
class Sweep:
    """Points along which one quantity varies, in ascending order, and the methods to run there."""

    label: str
    field: str
    points: tuple[Point, ...]
    methods: tuple[str, ...]

    @property
    def xs(self) -> list[float]:
        """The quantity that varies."""
        return [float(getattr(point, self.field)) for point in self.points]

    def counts(self, method: str, rows: Sequence[Row]) -> dict[int, list[int]]:
        """Return a method's iterations at the points, by seed; seeds that lack one are left out."""
        settings = [point.setting.shared for point in self.points]
        found = {
            (shared_by(row), row["seed"]): row["iterations"]
            for row in rows
            if row["method"] == method and row["reached"]
        }
        seeds = sorted({row["seed"] for row in rows})
        all_counts = {seed: [found.get((each, seed)) for each in settings] for seed in seeds}
        return {
            seed: [count for count in own if count is not None]
            for seed, own in all_counts.items()
            if None not in own
        }

    def measured(self, method: str, rows: Sequence[Row]) -> Spread:
        """Return the exponent of a method's iterations in the quantity, over the seeds."""
        return spread(slope(self.xs, own) for own in self.counts(method, rows).values())

    def theory(self, method: str) -> float:
        """Return the exponent of the theory at the same points."""
        return slope(self.xs, [THEORY[method](point) for point in self.points])


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the exponent of a power law through these points."""
    logs = [[math.log(value) for value in values] for values in (xs, ys)]
    return statistics.linear_regression(*logs).slope


def sweeps(*, quick: bool = False) -> list[Sweep]:
    """Return the three sweeps; the quick ones have few points at small condition numbers."""
    base = Point()
    exponents = (1.0, 1.5) if quick else (1.0, 1.5, 2.0, 2.5, 3.0)
    # The downlink is not compressed, so that only the uplink's omega and n matter.
    uplink = replace(base, kappa=10.0 if quick else 100.0, k_down=D)
    k_ups = (30, 8) if quick else (30, 15, 8, 4, 2)
    workers = (1, 4) if quick else (1, 4, 16, 64)
    by_kappa = tuple(replace(base, kappa=10.0**e) for e in exponents)
    by_omega = tuple(replace(uplink, k_up=k) for k in k_ups)
    by_n = tuple(replace(uplink, k_up=15 if quick else 3, n=n) for n in workers)
    methods = ("2Direction", "AGD", "EF21-P + DIANA")
    return [
        Sweep("condition number L/mu", "kappa", by_kappa, methods),
        Sweep("omega", "omega", by_omega, methods[::2]),
        Sweep("number of workers n", "n", by_n, methods[::2]),
    ]


def open_scaling(arguments: argparse.Namespace) -> Measure:
    """Return what measures the races of all sweeps."""
    found = sweeps(quick=arguments.quick)
    races: list[Race] = [(at.setting, sweep.methods) for sweep in found for at in sweep.points]
    return _open("scaling", races, arguments)
