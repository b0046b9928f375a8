"""How many iterations the methods take: by condition number, by omega, by number of workers.

The functions are the quadratics of ``winners.py``. All methods of a sweep have the same points.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from recipes.spread import Spread, spread
from recipes.two_direction.methods import Messages
from recipes.two_direction.race import Race, Row, Setting
from recipes.two_direction.winners import D, quadratic_setting

# Large enough for every run: a sweep without a result at one point is useless.
_BUDGET = 10**9
# Up to 1/L. With larger steps, 2Direction is faster with some seeds and diverges with others.
_POWERS = range(-7, 1)
COMPRESSED = ("2Direction", "EF21-P + DIANA")


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
        return quadratic_setting(self.kappa, self.n, sent, _BUDGET, _POWERS)


@dataclass(frozen=True)
class Sweep:
    """Points along which one quantity varies.

    Attributes:
        label: the quantity's name on an axis.
        field: the quantity's name in :class:`Point`.
        points: in ascending order.
        methods: what to run at each point.
    """

    label: str
    field: str
    points: tuple[Point, ...]
    methods: tuple[str, ...]

    def x(self, point: Point) -> float:
        """Return the quantity that varies."""
        return float(getattr(point, self.field))


def _two_direction_theory(at: Point) -> float:
    """Return the iterations of the paper's abstract, without the logarithm and the constant."""
    up = math.sqrt(at.kappa * at.omega**2 / at.n)
    return math.sqrt(at.kappa * (at.omega + 1) / at.alpha) + up + 1 / at.alpha + at.omega


def _ef21p_diana_theory(at: Point) -> float:
    return at.kappa / at.alpha + at.kappa * at.omega / at.n + at.omega


THEORY: dict[str, Callable[[Point], float]] = {
    "2Direction": _two_direction_theory,
    "AGD": lambda at: math.sqrt(at.kappa),
    "EF21-P + DIANA": _ef21p_diana_theory,
}


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
    return [
        Sweep("condition number L/mu", "kappa", by_kappa, ("2Direction", "AGD", "EF21-P + DIANA")),
        Sweep("omega", "omega", by_omega, COMPRESSED),
        Sweep("number of workers n", "n", by_n, COMPRESSED),
    ]


def scaling_races(*, quick: bool = False) -> list[Race]:
    """Return the races of all sweeps."""
    return [
        (point.setting, sweep.methods) for sweep in sweeps(quick=quick) for point in sweep.points
    ]


@dataclass(frozen=True)
class Slope:
    """A fitted exponent over the seeds, and the exponent of the theory at the same points."""

    measured: Spread
    theory: float


def counts(sweep: Sweep, method: str, rows: Sequence[Row]) -> dict[int, list[int]]:
    """Return the iterations of a method at the sweep's points, by seed.

    Seeds that lack a point are left out.
    """
    found = {(row.method, row.shared, row.seed): row.iterations for row in rows if row.reached}
    shared = [point.setting.shared for point in sweep.points]
    by_seed = {
        seed: [found.get((method, each, seed)) for each in shared]
        for seed in sorted({row.seed for row in rows})
    }
    return {
        seed: [count for count in own if count is not None]
        for seed, own in by_seed.items()
        if None not in own
    }


def exponent(sweep: Sweep, method: str, rows: Sequence[Row]) -> Slope:
    """Return the exponent of a method's iterations in the quantity that varies."""
    xs = [sweep.x(point) for point in sweep.points]
    measured = spread(slope(xs, own) for own in counts(sweep, method, rows).values())
    return Slope(measured, slope(xs, [THEORY[method](point) for point in sweep.points]))


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the exponent of a power law through these points."""
    logs = [[math.log(value) for value in values] for values in (xs, ys)]
    return statistics.linear_regression(*logs).slope
