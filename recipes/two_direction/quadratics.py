"""Quadratics f_i(x) = 1/2 x'Sx - b_i'x: where 2Direction wins, and how its iterations grow.

``winners`` maps the cheapest method. A run gives its cost at every price r of the downlink,
(1 - r) up + r down. Steps are tuned for r = 1/2, and the best one is the same for every r, because
an iteration costs the same with each. ``scaling`` counts iterations.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression

import torch
from torch import Tensor

from recipes.experiments import ResultTable
from recipes.rows import Row, Spread, distinct, spread, where
from recipes.two_direction.contest import OUTCOME, RUN, Setting, race
from recipes.two_direction.methods import Messages
from torchcomp.two_direction.method import Gradients

D = 60
FALL = 1e-4
"""A run ends when f - f* has fallen to this share of its value at the start."""
PRICES = (0.0, 0.5, 1.0)
"""The values of r."""
MAP = ("AGD, three sequences", "AGD", "2Direction", "EF21-P + DIANA")
_COMPRESSED = ("2Direction", "EF21-P + DIANA")
_KAPPAS, _KS, _WORKERS = (10.0, 100.0, 1e3, 1e4), (30, 6, 3), (4, 64)
_SENT = Messages(12, 12)
Races = list[tuple[Setting, Sequence[str]]]


class Quadratics:
    """n functions with L = Lmax = 1. The eigenvalues of S are spaced evenly in log from mu to 1."""

    def __init__(self, kappa: float, n: int, seed: int) -> None:
        self.n, self.d, self.mu = n, D, 1 / kappa
        generator = torch.Generator().manual_seed(seed)
        # The mean of the b_i does not depend on n.
        self.mean = torch.randn(D, dtype=torch.float64, generator=generator)
        own = torch.randn(n, D, dtype=torch.float64, generator=generator)
        self.b = self.mean + own - own.mean(0)
        self.s = torch.logspace(-math.log10(kappa), 0, D, dtype=torch.float64)
        self.start = float((self.mean.square() / self.s).sum())

    def gradients(self, workers: range) -> Gradients:
        b = self.b[workers.start : workers.stop]
        return lambda x: self.s * x - b

    def value(self, x: Tensor) -> float:
        """Return f(x) - f*, relative to its value at x = 0."""
        return float((self.s * (x - self.mean / self.s).square()).sum()) / self.start


def quadratic_setting(
    kappa: float, n: int, sent: Messages, budget: int, powers: range = range(-6, 7)
) -> Setting:
    return Setting(
        lambda seed: (Quadratics(kappa, n, seed), 0.0),
        *(n, 1 / kappa, sent, FALL, budget, powers),
    )


def open_winners(arguments: argparse.Namespace) -> Callable[[], None]:
    quick = arguments.quick
    kappas, ks = (_KAPPAS[:2], _KS[:2]) if quick else (_KAPPAS, _KS)
    races: Races = [
        # Up to 1.6 times what AGD with three sequences needs. 2Direction's uplink is two fifths of
        # its total and AGD's a half, so a run beyond the budget has lost at every price.
        (
            quadratic_setting(kappa, n, Messages(k, k), round(1200 * math.sqrt(kappa))),
            # The iterations of EF21-P + DIANA grow with kappa. It has lost at 1,000 everywhere.
            MAP if kappa < max(_KAPPAS) else MAP[:-1],
        )
        for n in (_WORKERS[:1] if quick else _WORKERS)
        for kappa in kappas
        for k in ks
    ]
    return _open(arguments, "winners", races)


def _open(arguments: argparse.Namespace, name: str, races: Races) -> Callable[[], None]:
    task = f"quadratics of {D} dimensions, f - f* to {FALL:g} of its start"
    path = arguments.out / f"{name}.csv"
    table = ResultTable(path, RUN, OUTCOME, task, resume=arguments.resume)

    def measure() -> None:
        for setting, methods in races:
            race(setting, methods, arguments.seeds, table)

    return measure


@dataclass(frozen=True)
class Point:
    kappa: float = 100.0
    n: int = 4
    sent: Messages = _SENT

    @property
    def omega(self) -> float:
        return D / self.sent.up - 1

    @property
    def setting(self) -> Setting:
        # The budget is enough for every run: a sweep without a result at one point is useless.
        # Steps are at most 1/L. With larger ones, 2Direction diverges with some seeds.
        return quadratic_setting(self.kappa, self.n, self.sent, 10**9, range(-7, 1))


@dataclass(frozen=True)
class Sweep:
    """Points along which one quantity varies; ``x`` is its name in :class:`Point`."""

    label: str
    x: str
    points: tuple[Point, ...]
    methods: tuple[str, ...]

    def xs(self) -> list[float]:
        return [float(getattr(point, self.x)) for point in self.points]


def sweeps(*, quick: bool = False) -> list[Sweep]:
    base = Point()
    # The downlink is not compressed, so that only the uplink's omega and n matter.
    uplink = replace(base, kappa=10.0 if quick else 100.0)
    by_kappa = [replace(base, kappa=10.0**e) for e in (1.0, 1.5, 2.0, 2.5, 3.0)]
    by_omega = [replace(uplink, sent=Messages(k, D)) for k in (30, 15, 8, 4, 2)]
    by_n = [replace(uplink, sent=Messages(3, D), n=n) for n in (1, 4, 16, 64)]
    shown = [tuple(own[: 2 if quick else None]) for own in (by_kappa, by_omega, by_n)]
    return [
        Sweep("condition number L/mu", "kappa", shown[0], ("2Direction", "AGD", _COMPRESSED[1])),
        Sweep("omega", "omega", shown[1], _COMPRESSED),
        Sweep("number of workers n", "n", shown[2], _COMPRESSED),
    ]


def open_scaling(arguments: argparse.Namespace) -> Callable[[], None]:
    found = sweeps(quick=arguments.quick)
    races: Races = [(point.setting, sweep.methods) for sweep in found for point in sweep.points]
    return _open(arguments, "scaling", races)


def theory(method: str, at: Point) -> float:
    """Return the iterations of the paper's abstract, without logarithms and constants."""
    kappa, omega, alpha = at.kappa, at.omega, at.sent.down / D
    if method == "AGD":
        return math.sqrt(kappa)
    if method == "EF21-P + DIANA":
        return kappa / alpha + kappa * omega / at.n + omega
    up = math.sqrt(kappa * omega**2 / at.n)
    return math.sqrt(kappa * (omega + 1) / alpha) + up + 1 / alpha + omega


def exponents(sweep: Sweep, method: str, rows: Sequence[Row]) -> tuple[Spread, float]:
    """Return the fitted exponents of the seeds that have all points, and that of the theory."""
    found = []
    for seed in distinct(rows, "seed"):
        own = where(rows, method=method, seed=seed, reached=True)
        by_point = {(*(row[name] for name in RUN[:5]),): row["iterations"] for row in own}
        counts = [by_point.get(point.setting.shared) for point in sweep.points]
        if None not in counts:
            found.append(_slope(sweep.xs(), counts))
    return spread(found), _slope(sweep.xs(), [theory(method, at) for at in sweep.points])


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    return linear_regression(*([math.log(value) for value in values] for values in (xs, ys))).slope
