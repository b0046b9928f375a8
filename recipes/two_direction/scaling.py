"""How many iterations the methods take, by condition number, by omega and by the number of workers.

    python -m recipes.two_direction.scaling

Quadratics f_i(x) = 1/2 x'Sx - b_i'x with logarithmically spaced eigenvalues from 1/kappa to 1, so
that L = Lmax = 1 and mu = 1/kappa; a run ends when f - f* has fallen to 1e-4 of its start. Step
sizes are the theory's times 2^i, with the best i: by condition number one for all, found in the
middle, so that the tuning's grid leaves no trace in the slope; elsewhere one for each point, since
there the theory's constants weigh its terms against each other. With many workers only the
neighbours of the best i of the point before are tried.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.errors import told_in_one_line
from recipes.result_files import make_folder, pyplot, write_csv
from recipes.two_direction.tuning import tune
from torchcomp.algorithms.agd import AGD
from torchcomp.algorithms.ef21p_diana import EF21PDIANA
from torchcomp.algorithms.method import Method
from torchcomp.algorithms.parameter_server import ParameterServer, Simulated
from torchcomp.algorithms.two_direction import TwoDirectionMethod
from torchcomp.algorithms.two_direction.theory import lbar
from torchcomp.compressors import Identity, RandK, TopK

_HERE = Path(__file__).resolve().parent
DIMENSIONS = 60
FALL = 1e-4
FACTORS = range(-3, 11)
_BUDGET = 10**9
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
        """Relative variance of the way up."""
        return DIMENSIONS / self.k_up - 1

    @property
    def alpha(self) -> float:
        """Contraction of the way down."""
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
        # A common part, so that the problem stays the same however many workers there are.
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
    # No theory asks for less than L; the tuning tries.
    step = max(bound / factor, point.mu)
    return TwoDirectionMethod(gradients, _x0(), server, up, down, lbar=step, mu=point.mu)


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
    """One quantity varied, the others held."""

    label: str
    field: str
    points: dict[str, tuple[Quadratic, ...]]
    one_step: bool

    def x(self, point: Quadratic) -> float:
        """Return the quantity that is varied."""
        return float(getattr(point, self.field))


def _two_direction_theory(q: Quadratic) -> float:
    """The iterations of the paper's abstract, without logarithm and constant."""
    up = math.sqrt(q.kappa * q.omega**2 / q.n)
    return math.sqrt(q.kappa * (q.omega + 1) / q.alpha) + up + 1 / q.alpha + q.omega


def _ef21p_diana_theory(q: Quadratic) -> float:
    return q.kappa / q.alpha + q.kappa * q.omega / q.n + q.omega


THEORY = {
    "2Direction": _two_direction_theory,
    "AGD": lambda q: math.sqrt(q.kappa),
    "EF21-P + DIANA": _ef21p_diana_theory,
}


def _sweeps() -> list[Sweep]:
    base = Quadratic()
    steep = tuple(replace(base, kappa=10.0**e) for e in (3, 3.5, 4, 4.5, 5))
    # Without acceleration the larger condition numbers take too long.
    flat = tuple(replace(base, kappa=10.0**e) for e in (1, 1.5, 2, 2.5, 3))
    by_kappa = {"2Direction": steep, "AGD": steep, "EF21-P + DIANA": flat}
    # No compression down, so that the way up is what counts.
    wide = replace(base, kappa=100.0, k_down=DIMENSIONS)
    variances = tuple(replace(wide, k_up=k) for k in (30, 15, 8, 4, 2, 1))
    crowds = tuple(replace(wide, k_up=2, n=n) for n in (1, 4, 16, 64, 250, 1000))
    both = ("2Direction", "EF21-P + DIANA")
    return [
        Sweep("condition number L/mu", "kappa", by_kappa, one_step=True),
        Sweep("omega", "omega", dict.fromkeys(both, variances), one_step=False),
        Sweep("number of workers n", "n", dict.fromkeys(both, crowds), one_step=False),
    ]


SWEEPS = _sweeps()


@dataclass(frozen=True)
class Count:
    """Iterations of one method at one point; its step size is the theory's times 2^power."""

    method: str
    point: Quadratic
    power: int
    iterations: int


def measure(sweep: Sweep, method: str) -> list[Count]:
    """Count along the sweep, with step sizes tuned as the sweep wants them."""
    points = sweep.points[method]
    if sweep.one_step:
        power = _tuned(points[len(points) // 2], method, FACTORS).power
        return [_tuned(point, method, range(power, power + 1)) for point in points]
    counts: list[Count] = []
    for point in points:
        power = counts[-1].power if counts else 0
        near = range(power - 1, power + 2)
        counts.append(_tuned(point, method, near if point.n > _MANY else FACTORS))
    return counts


def _tuned(point: Quadratic, method: str, powers: range) -> Count:
    gradients, fallen = point.functions()
    best = tune(
        lambda factor: METHODS[method](point, gradients, Simulated(point.n), factor),
        fallen,
        target=FALL,
        budget=_BUDGET,
        powers=powers,
    )
    if not best.run.reached:
        raise RuntimeError(f"{method} does not get there: {point}")
    return Count(method, point, best.power, best.run.method.iterations)


def slope(xs: Iterable[float], ys: Iterable[float]) -> float:
    """Return the exponent of a power law through these points."""
    logs = [[math.log(value) for value in values] for values in (xs, ys)]
    return statistics.linear_regression(*logs).slope


@told_in_one_line()
def main() -> None:
    """Measure, show and write; a file and a picture for each sweep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    fields = [sweep.field for sweep in SWEEPS]
    parser.add_argument("--sweeps", nargs="+", choices=fields, default=fields)
    parser.add_argument("--out", type=Path, default=_HERE / "results", help="folder of the files")
    arguments = parser.parse_args()
    make_folder(arguments.out)
    torch.set_num_threads(1)
    for sweep in SWEEPS:
        if sweep.field in arguments.sweeps:
            started = time.monotonic()
            print(f"\n{sweep.label}: iterations until f - f* has fallen to {FALL:g}")
            counted = [_shown(sweep, measure(sweep, method)) for method in sweep.points]
            write(sweep, counted, arguments.out)
            print(f"in {time.monotonic() - started:.0f} s")


def _shown(sweep: Sweep, counts: list[Count]) -> list[Count]:
    print(line(sweep, counts), flush=True)
    return counts


def write(sweep: Sweep, counted: list[list[Count]], folder: Path) -> None:
    """Write what each method counted, and draw it."""
    header = ["method", sweep.field, "iterations", "theory", "power"]
    rows = [cells(sweep, count) for counts in counted for count in counts]
    path = folder / f"scaling_{sweep.field}.csv"
    write_csv(path, header, rows)
    draw(sweep, counted, path.with_suffix(".png"))


def cells(sweep: Sweep, count: Count) -> list[object]:
    """Return a count as a row of the CSV."""
    theory = THEORY[count.method](count.point)
    value = f"{sweep.x(count.point):g}"
    return [count.method, value, count.iterations, f"{theory:.6g}", count.power]


def line(sweep: Sweep, counts: list[Count]) -> str:
    """Return a method's line of the table, with the exponents measured and in theory."""
    ours, theirs = exponents(sweep, counts)
    found = "  ".join(f"{sweep.x(c.point):g}: {c.iterations:,}" for c in counts)
    return f"{counts[0].method:<16} slope {ours:+.2f} (theory {theirs:+.2f})   {found}"


def exponents(sweep: Sweep, counts: list[Count]) -> tuple[float, float]:
    """Return the fitted exponent, and that of the theory's line over the same points."""
    xs = [sweep.x(count.point) for count in counts]
    theory = [THEORY[count.method](count.point) for count in counts]
    return slope(xs, [count.iterations for count in counts]), slope(xs, theory)


def draw(sweep: Sweep, counted: list[list[Count]], path: Path) -> None:
    """Draw the counts, and the theory's lines through their middle."""
    figure, axes = pyplot().subplots(figsize=(6.5, 5), layout="constrained")
    for counts in counted:
        _draw_counts(axes, sweep, counts)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(sweep.label)
    axes.set_ylabel(f"iterations until f − f* has fallen to {FALL:g}")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)
    pyplot().close(figure)


def _draw_counts(axes: Any, sweep: Sweep, counts: list[Count]) -> None:
    method = counts[0].method
    colour = f"C{list(METHODS).index(method)}"
    xs = [sweep.x(count.point) for count in counts]
    theory = [THEORY[method](count.point) for count in counts]
    ratios = [count.iterations / bound for count, bound in zip(counts, theory, strict=True)]
    scale = math.exp(statistics.fmean(map(math.log, ratios)))
    ours, theirs = exponents(sweep, counts)
    label = f"{method}: slope {ours:+.2f}"
    axes.plot(xs, [count.iterations for count in counts], "o-", color=colour, label=label)
    dashed = f"theory, times {scale:.2g}: slope {theirs:+.2f}"
    axes.plot(xs, [scale * bound for bound in theory], "--", color=colour, label=dashed)


if __name__ == "__main__":
    main()
