"""How many iterations the methods take: by condition number, by omega, by number of workers.

The functions are quadratics f_i(x) = 1/2 x'Sx - b_i'x with logarithmically spaced eigenvalues from
1/kappa to 1. Hence L = Lmax = 1 and mu = 1/kappa. A run ends when f - f* has fallen to 1e-4 of its
start.

Step sizes are the theory's times 2^i, with the best i. The sweep by condition number uses one i for
all points, found at the middle one, because a change of i between two points would bend the slope.
The other sweeps use one i per point, because the theory's constants weigh its terms against each
other there. With many workers, only the neighbours of the previous point's i are tried.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.experiments import ResultTable
from recipes.two_direction.tuning import tune
from torchcomp.algorithms.agd import AGD
from torchcomp.algorithms.ef21p_diana import EF21PDIANA
from torchcomp.algorithms.method import Method
from torchcomp.algorithms.parameter_server import ParameterServer, Simulated
from torchcomp.algorithms.two_direction import TwoDirectionMethod
from torchcomp.algorithms.two_direction.theory import lbar
from torchcomp.compressors import Identity, RandK, TopK

DIMENSIONS = 60
FALL = 1e-4
FACTORS = range(-3, 11)
# Large enough for every run: a sweep without a result at one point is useless.
_BUDGET = 10**9
# Above this number of workers, an iteration costs too much to try all factors.
_MANY = 16


@dataclass(frozen=True)
class Quadratic:
    """One point of a sweep: the functions, and the compressors."""

    kappa: float = 1e3
    n: int = 4
    k_up: int = 6
    k_down: int = 6

    @property
    def omega(self) -> float:
        """Relative variance of the uplink compressor."""
        return DIMENSIONS / self.k_up - 1

    @property
    def alpha(self) -> float:
        """Contraction of the downlink compressor."""
        return self.k_down / DIMENSIONS

    @property
    def mu(self) -> float:
        """Strong convexity."""
        return 1 / self.kappa

    @property
    def eigenvalues(self) -> Tensor:
        """Curvature along each axis."""
        return torch.logspace(-math.log10(self.kappa), 0, DIMENSIONS, dtype=torch.float64)

    def functions(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], float]]:
        """Return the workers' gradients, and f - f* relative to the start."""
        # The mean of all b_i is the common part, so f does not depend on the number of workers.
        generator = torch.Generator().manual_seed(0)
        common = torch.randn(DIMENSIONS, dtype=torch.float64, generator=generator)
        own = torch.randn(self.n, DIMENSIONS, dtype=torch.float64, generator=generator)
        b, s = common + own - own.mean(0), self.eigenvalues
        start = float((common.square() / s).sum())

        def fallen(x: Tensor) -> float:
            return float((s * (x - common / s).square()).sum()) / start

        return lambda x: s * x - b, fallen


def _two_direction(
    point: Quadratic, gradients: Any, server: ParameterServer, factor: float
) -> Method:
    p = 1 / (point.omega + 1)
    constants = {"alpha": point.alpha, "omega": point.omega, "p": p, "tau": p}
    bound = lbar(1.0, 1.0, n=point.n, **constants, constant=1.0)
    up, down = _compressors(point)
    # lbar can fall below the theory's minimum L here, but the method requires at least mu.
    scaled = max(bound / factor, point.mu)
    return TwoDirectionMethod(gradients, _x0(), server, up, down, lbar=scaled, mu=point.mu)


def _ef21p_diana(
    point: Quadratic, gradients: Any, server: ParameterServer, factor: float
) -> Method:
    # The theory's step size without its constants 100 and 160.
    gamma = factor / max(1 / point.alpha, point.omega / point.n)
    up, down = _compressors(point)
    return EF21PDIANA(gradients, _x0(), server, up, down, gamma=gamma)


def _agd(point: Quadratic, gradients: Any, server: ParameterServer, factor: float) -> Method:
    return AGD(gradients, _x0(), server, lbar=max(1 / factor, point.mu), mu=point.mu)


def _compressors(point: Quadratic) -> tuple[RandK, TopK | Identity]:
    dense = point.k_down == DIMENSIONS
    return RandK(k=point.k_up, unbiased=True), Identity() if dense else TopK(k=point.k_down)


def _x0() -> Tensor:
    return torch.zeros(DIMENSIONS, dtype=torch.float64)


METHODS = {"2Direction": _two_direction, "AGD": _agd, "EF21-P + DIANA": _ef21p_diana}


@dataclass(frozen=True)
class Sweep:
    """Points along which one quantity varies.

    Attributes:
        label: the quantity's name on an axis.
        field: the quantity's name in :class:`Quadratic`.
        points: of each method.
        one_step: whether all points of a method use the same factor of the step size.
    """

    label: str
    field: str
    points: dict[str, tuple[Quadratic, ...]]
    one_step: bool

    def x(self, point: Quadratic) -> float:
        """Return the quantity that varies."""
        return float(getattr(point, self.field))

    @property
    def task(self) -> str:
        """All settings of the sweep, for the head of its table."""
        all_points = [point for points in self.points.values() for point in points]
        values = {name: {asdict(point)[name] for point in all_points} for name in _FIELDS}
        fixed = [f"{name} = {own.pop():g}" for name, own in values.items() if len(own) == 1]
        varied = " ".join(f"{x:g}" for x in sorted(set(map(self.x, all_points))))
        problem = f"quadratics of {DIMENSIONS} dimensions, {', '.join(fixed)}"
        return f"{problem}, f - f* to {FALL:g} of its start, at {self.field} = {varied}"


def _two_direction_theory(q: Quadratic) -> float:
    """Return the iterations of the paper's abstract, without the logarithm and the constant."""
    up = math.sqrt(q.kappa * q.omega**2 / q.n)
    return math.sqrt(q.kappa * (q.omega + 1) / q.alpha) + up + 1 / q.alpha + q.omega


def _ef21p_diana_theory(q: Quadratic) -> float:
    return q.kappa / q.alpha + q.kappa * q.omega / q.n + q.omega


THEORY = {
    "2Direction": _two_direction_theory,
    "AGD": lambda q: math.sqrt(q.kappa),
    "EF21-P + DIANA": _ef21p_diana_theory,
}


def sweeps(*, quick: bool = False) -> list[Sweep]:
    """Return the three sweeps; the quick ones have few points at small condition numbers."""
    base = Quadratic()
    # Without acceleration, the larger condition numbers would take too long.
    steep, flat = ((2, 2.5), (1, 1.5)) if quick else ((3, 3.5, 4, 4.5, 5), (1, 1.5, 2, 2.5, 3))
    accelerated = tuple(replace(base, kappa=10.0**e) for e in steep)
    plain = tuple(replace(base, kappa=10.0**e) for e in flat)
    by_kappa = {"2Direction": accelerated, "AGD": accelerated, "EF21-P + DIANA": plain}
    # The downlink is not compressed, so that only the uplink's omega and n matter.
    uplink = replace(base, kappa=10.0 if quick else 100.0, k_down=DIMENSIONS)
    k_ups = (30, 8) if quick else (30, 15, 8, 4, 2, 1)
    workers = (1, 4) if quick else (1, 4, 16, 64, 250, 1000)
    by_omega = tuple(replace(uplink, k_up=k) for k in k_ups)
    by_n = tuple(replace(uplink, k_up=15 if quick else 2, n=n) for n in workers)
    compressed = ("2Direction", "EF21-P + DIANA")
    return [
        Sweep("condition number L/mu", "kappa", by_kappa, one_step=True),
        Sweep("omega", "omega", dict.fromkeys(compressed, by_omega), one_step=False),
        Sweep("number of workers n", "n", dict.fromkeys(compressed, by_n), one_step=False),
    ]


_FIELDS = ("kappa", "n", "k_up", "k_down")
SWEEPS = ("kappa", "omega", "n")
"""The fields of the sweeps."""


@dataclass(frozen=True)
class Count:
    """The iterations of one method at one point, and a row of the table.

    Attributes:
        method: its name.
        x: the quantity that varies.
        iterations: until f - f* has fallen.
        theory: the theory's iterations, up to a constant.
        power: the step size is the theory's times 2^power.
    """

    method: str
    x: float
    iterations: int
    theory: float
    power: int

    @classmethod
    def read(cls, field: str, row: dict[str, str]) -> "Count":
        """Read a row of the table."""
        numbers = (float(row[field]), int(row["iterations"]), float(row["theory"]))
        return cls(row["method"], *numbers, int(row["power"]))

    def cells(self) -> list[object]:
        """Return the row of the table."""
        method, x, iterations, theory, power = astuple(self)
        return [method, f"{x:g}", iterations, f"{theory:.6g}", power]


def measure(sweep: Sweep, method: str, finished: Sequence[Count] = ()) -> Iterator[Count]:
    """Yield the counts of the points that follow the finished ones."""
    points = sweep.points[method]
    missing = points[len(finished) :]
    if missing and sweep.one_step:
        if finished:
            power = finished[0].power
        else:
            power = _tuned(sweep, points[len(points) // 2], method, FACTORS).power
        for point in missing:
            yield _tuned(sweep, point, method, range(power, power + 1))
        return
    power = finished[-1].power if finished else 0
    for point in missing:
        neighbours = range(power - 1, power + 2)
        count = _tuned(sweep, point, method, neighbours if point.n > _MANY else FACTORS)
        power = count.power
        yield count


def _tuned(sweep: Sweep, point: Quadratic, method: str, powers: range) -> Count:
    gradients, fallen = point.functions()
    best = tune(
        lambda factor: METHODS[method](point, gradients, Simulated(point.n), factor),
        fallen,
        target=FALL,
        budget=_BUDGET,
        powers=powers,
    )
    if not best.run.reached:
        raise RuntimeError(f"{method} does not reach {FALL:g} of f(x0) - f* at {point}")
    iterations = best.run.method.iterations
    return Count(method, sweep.x(point), iterations, THEORY[method](point), best.power)


def open_table(sweep: Sweep, folder: Path, *, resume: bool) -> ResultTable:
    """Open the sweep's table, with the finished points if the run is resumed."""
    header = ("method", sweep.field, "iterations", "theory", "power")
    return ResultTable(folder / f"scaling_{sweep.field}.csv", header, sweep.task, resume=resume)


def run_sweep(sweep: Sweep, table: ResultTable) -> None:
    """Measure the points that the table lacks; print each method's line as it ends."""
    print(f"\n{sweep.label}: iterations until f - f* has fallen to {FALL:g} of its start")
    for method in sweep.points:
        # The rows of a method are a prefix of its points, because they are measured in order.
        finished = _of_method(sweep, table, method)
        for count in measure(sweep, method, finished):
            table.add(count.cells())
        print(line(_of_method(sweep, table, method)), flush=True)


def _of_method(sweep: Sweep, table: ResultTable, method: str) -> list[Count]:
    return [Count.read(sweep.field, row) for row in table.rows if row["method"] == method]


def line(counts: list[Count]) -> str:
    """Return a method's line of the printed table, with both exponents."""
    measured, predicted = exponents(counts)
    found = "  ".join(f"{count.x:g}: {count.iterations:,}" for count in counts)
    return f"{counts[0].method:<16} slope {measured:+.2f} (theory {predicted:+.2f})   {found}"


def exponents(counts: list[Count]) -> tuple[float, float]:
    """Return the fitted exponent, and the exponent of the theory at the same points."""
    xs = [count.x for count in counts]
    measured = slope(xs, [count.iterations for count in counts])
    return measured, slope(xs, [count.theory for count in counts])


def slope(xs: Iterable[float], ys: Iterable[float]) -> float:
    """Return the exponent of a power law through these points."""
    logs = [[math.log(value) for value in values] for values in (xs, ys)]
    return statistics.linear_regression(*logs).slope


def theory_factor(counts: list[Count]) -> float:
    """Return the constant that fits the theory to the counts."""
    ratios = [count.iterations / count.theory for count in counts]
    return statistics.geometric_mean(ratios)
