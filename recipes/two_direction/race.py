"""A race: methods on one problem, each with its best step size 2^i, and a row for each run.

A reported seed chooses no setting. Step sizes are tuned on the problem and the messages of a seed
that is not reported. A second such seed checks the choice: where f oscillates, the first can reach
the gap by chance with a step that is too large. If the second does not reach the gap, smaller steps
are tried.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recipes.errors import RecipeError
from recipes.experiments import ResultTable, tuning_seeds
from recipes.rows import Row, typed, where
from recipes.two_direction.methods import ACCELERATED, METHODS, Messages, Problem
from recipes.two_direction.tuning import MethodRun, Tuned, tune
from torchcomp.two_direction.parameter_server import ParameterServer, Simulated

Case = Callable[[int], tuple[Problem, float]]
"""A function from a seed to the problem and the infimum of its value."""

SHARED = ("n", "mu", "k_up", "k_down", "p", "gap")
"""The columns that name a setting; p is that of 2Direction's coin, 0 for 1/(omega + 1)."""
RUN = (*SHARED, "method", "power", "seed")
OUTCOME = ("reached", "iterations", "value", "up", "down", "bytes_up", "bytes_down")
CURVE_OF, CURVE = ("mu", "method"), ("iterations", "total", "gap")
# More points would not change the picture.
_CURVE_POINTS = 100
# If the second tuning seed fails, try this many smaller step sizes.
_SMALLER = 3
# It fails if it needs this many times the coordinates of the first.
_SLOWER = 4


@dataclass(frozen=True)
class Setting:
    """What all methods of a race share: the problem, the messages, and the limits of a run.

    Attributes:
        name: of the data.
        case: the problem of a seed.
        n: number of workers.
        mu: strong convexity; 0 is allowed.
        sent: the compressed messages.
        gap: a run ends when f - f* is at most this.
        budget: coordinates, up and down, that a run can send.
        powers: the i of the step sizes 2^i to try.
    """

    name: str
    case: Case
    n: int
    mu: float
    sent: Messages
    gap: float
    budget: int
    powers: range

    def __str__(self) -> str:
        sizes = f"{self.n} workers, K = {self.sent.k_up} up and {self.sent.k_down} down"
        chance = f", p = {self.sent.chance.p:.4g}" if self.sent.chance else ""
        return f"{self.name}, mu = {self.mu:g}, {sizes}{chance}"

    @property
    def shared(self) -> tuple[float, ...]:
        """The cells of :data:`SHARED`."""
        p = self.sent.chance.p if self.sent.chance else 0.0
        return (self.n, self.mu, self.sent.k_up, self.sent.k_down, p, self.gap)

    def steps(self, method: str) -> list[int]:
        """Return the i of the step sizes 2^i that a method allows."""
        return [i for i in self.powers if method not in ACCELERATED or 2.0**i * self.mu <= 1]


Race = tuple[Setting, Sequence[str]]
"""A setting, and the names of the methods to run in it."""


def shared_by(row: Row) -> tuple[float, ...]:
    """Return the cells of a row that name its setting."""
    return tuple(row[name] for name in SHARED)


def check(setting: Setting, methods: Sequence[str], seeds: Sequence[int]) -> None:
    """Find f* and construct every method, before anything is measured."""
    f, _ = setting.case(tuning_seeds(seeds, 1)[0])
    low, high = setting.powers[0], setting.powers[-1]
    for method in methods:
        if not (allowed := setting.steps(method)):
            raise RecipeError(
                f"--powers {low} {high}: {method} allows no step size above 1/mu = "
                f"{1 / setting.mu:g}; choose a smaller LOW"
            )
        METHODS[method](f, Simulated(setting.n), setting.sent, 2.0 ** allowed[0])


def run(
    setting: Setting, method: str, power: int, seed: int, server: ParameterServer | None = None
) -> MethodRun:
    """Run a method with step size 2^power until it reaches the gap or spends the budget."""
    f, least = setting.case(seed)
    built = METHODS[method](f, server or Simulated(setting.n, seed), setting.sent, 2.0**power)
    out = MethodRun(built, f.value, least + setting.gap)
    out.advance(setting.budget)
    return out


def tuned(setting: Setting, method: str, seeds: Sequence[int]) -> Tuned:
    """Return the method's step size 2^i, chosen with the tuning seeds of the reported ``seeds``."""
    first, second = tuning_seeds(seeds, 2)
    f, least = setting.case(first)
    best = tune(
        lambda step: METHODS[method](f, Simulated(setting.n, first), setting.sent, step),
        f.value,
        target=least + setting.gap,
        budget=setting.budget,
        powers=setting.steps(method),
    )
    if not best.run.reached:
        return best
    limited = replace(setting, budget=min(setting.budget, _SLOWER * best.run.cost))
    for power in range(best.power, best.power - 1 - _SMALLER, -1):
        if run(limited, method, power, second).reached:
            return replace(best, power=power)
    return best


def measure(
    setting: Setting, method: str, seeds: Sequence[int], known: Sequence[Row]
) -> Iterator[tuple[int, int, MethodRun]]:
    """Run the seeds that the ``known`` rows lack; yield the power, the seed and the run of each.

    If no step size reaches the gap on the tuning seed, its best run there is the only one.
    """
    failed_on = tuning_seeds(seeds, 1)[0]
    missing = [seed for seed in seeds if seed not in {row["seed"] for row in known}]
    if not missing or [row["seed"] for row in known] == [failed_on]:
        return
    if known:
        power = known[0]["power"]
    else:
        best = tuned(setting, method, seeds)
        power = best.power
        if not best.run.reached:
            yield power, failed_on, best.run
            return
    for seed in missing:
        yield power, seed, run(setting, method, power, seed)


def race(
    setting: Setting, methods: Sequence[str], seeds: Sequence[int], table: ResultTable
) -> None:
    """Run what the table lacks; save each run, with the curve of each method's first one."""
    print(f"\n{setting}: f - f* <= {setting.gap:g}")
    for method in methods:
        known = where(typed(table.rows), method=method)
        known = [row for row in known if shared_by(row) == setting.shared]
        for power, seed, done in measure(setting, method, seeds, known):
            points = [] if known else curve(done, setting.case(seed)[1])
            table.add((*setting.shared, method, power, seed), outcome(done), points)
            known = [*known, *typed(table.rows[-1:])]
        print(line(known), flush=True)


def outcome(done: MethodRun) -> tuple[Any, ...]:
    """Return the cells of :data:`OUTCOME`."""
    last, sent = done.curve[-1], done.curve[-1].traffic
    counts = (sent.up_coordinates, sent.down_coordinates, sent.up_bytes, sent.down_bytes)
    return (done.reached, last.iterations, last.value, *counts)


def curve(done: MethodRun, least: float) -> list[tuple[Any, ...]]:
    """Return about :data:`_CURVE_POINTS` points of a run, with the cells of :data:`CURVE`."""
    stride = -(-len(done.curve) // _CURVE_POINTS)
    points = [*done.curve[:-1:stride], done.curve[-1]]
    return [
        (point.iterations, point.traffic.coordinates, f"{point.value - least:.6g}")
        for point in points
    ]


def line(rows: Sequence[Row]) -> str:
    """Return a method's line of the printed table, over all seeds."""
    reached = [row["up"] + row["down"] for row in rows if row["reached"]]
    power = f"2^{rows[0]['power']}"
    name = f"{rows[0]['method']:<22}{power:>6}{len(reached):>4} of {len(rows)}"
    if not reached:
        return f"{name}   not within {rows[0]['up'] + rows[0]['down']:,} coordinates"
    spread = f"{min(reached):,} to {max(reached):,} coordinates"
    return f"{name}   {sum(reached) / len(reached):,.0f} coordinates ({spread})"
