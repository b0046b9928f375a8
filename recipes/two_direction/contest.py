"""What a worker sends and receives until f is within a gap of f*, by regulariser and n.

Each method uses its best step size 2^i. A reported seed chooses no step: step sizes are tuned on
the shards and the messages of a seed that is not reported. A second such seed checks the choice:
where f oscillates, the first can reach the gap by chance with a step that is too large.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from recipes.experiments import ResultTable, tuning_seeds
from recipes.rows import Row, typed, where
from recipes.two_direction.data_sets import Samples, open_samples
from recipes.two_direction.methods import ACCELERATED, METHODS, Messages, Problem
from recipes.two_direction.softmax_regression import SoftmaxRegression, minimise
from recipes.two_direction.tuning import MethodRun, Tuned, tune
from torchcomp.two_direction.parameter_server import Simulated

MUS, QUICK_MUS = (0.0, 1e-4, 1e-3, 1e-2), (0.0, 1e-2)
WORKERS, QUICK_WORKERS = (10, 100), (10,)
# f - f* to reach. Without a regulariser, f - f* falls too slowly to reach 1e-6.
GAP, GAP_WITHOUT_MU, QUICK_GAP = 1e-6, 1e-3, 1e-1
# The methods of the paper's own comparison, and AGD's other form.
PAPER = ("2Direction", "AGD", "AGD, three sequences", "EF21-P + DIANA")
# Coordinates that a run can send. The others need more than the paper's in most settings.
BUDGET, BUDGET_OF_OTHERS = 1_000_000, 300_000

SHARED = ("n", "mu", "k_up", "k_down", "gap")
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
    """What all methods of a race share: the problem, the messages, and the limits of a run."""

    case: Callable[[int], tuple[Problem, float]]  # from a seed to the problem and its infimum
    n: int  # workers
    mu: float  # strong convexity; 0 is allowed
    sent: Messages
    gap: float  # a run ends when f - f* is at most this
    budget: int  # coordinates, up and down, that a run can send
    powers: range  # the i of the step sizes 2^i to try

    @property
    def shared(self) -> tuple[float, ...]:
        return (self.n, self.mu, *self.sent, self.gap)

    def steps(self, method: str) -> list[int]:
        """Return the i of the step sizes 2^i that a method allows."""
        return [i for i in self.powers if method not in ACCELERATED or 2.0**i * self.mu <= 1]


def powers_for(mu: float) -> range:
    """Return the i to try. No best one is at an end, except at 1/mu."""
    # Without a regulariser, f becomes ever flatter on the way, so larger steps are stable.
    return range(-4, 9) if mu else range(17)


def setting(samples: Samples, n: int, mu: float, *, quick: bool = False) -> Setting:
    """Return softmax regression on n workers, with messages of a tenth of d."""
    gap = QUICK_GAP if quick else GAP if mu else GAP_WITHOUT_MU

    # The minimisation takes seconds, and every method needs the same f*.
    @lru_cache(maxsize=16)
    def case(seed: int) -> tuple[Problem, float]:
        f = SoftmaxRegression(samples.shards(n, seed), mu)
        return f, minimise(f, gap / 100)

    k = max(1, samples.d // 10)
    return Setting(
        case, n, mu, Messages(k, k), gap, BUDGET, range(-1, 7) if quick else powers_for(mu)
    )


def open_contest(arguments: argparse.Namespace) -> Callable[[], None]:
    """Open the tables of the contest, and return what measures it."""
    samples, quick = open_samples(arguments.dataset, arguments.data), arguments.quick
    parts = []
    for n in QUICK_WORKERS if quick else WORKERS:
        settings = [setting(samples, n, mu, quick=quick) for mu in (QUICK_MUS if quick else MUS)]
        races = [(each, PAPER) for each in settings]
        if not quick:
            others = [method for method in METHODS if method not in PAPER]
            races += [(replace(each, budget=BUDGET_OF_OTHERS), others) for each in settings]
        table = ResultTable(
            arguments.out / f"contest_{samples.name}_n{n}.csv",
            *(RUN, OUTCOME, _task(samples, settings[0])),
            resume=arguments.resume,
            curve=CURVE,
            curve_of=CURVE_OF,
        )
        parts.append((table, races))

    def measure() -> None:
        for table, races in parts:
            for each, methods in races:
                race(each, methods, arguments.seeds, table)

    return measure


def _task(samples: Samples, one: Setting) -> str:
    steps = ", ".join(
        f"2^{own[0]} to 2^{own[-1]} for {name}"
        for name, own in (("mu > 0", powers_for(1.0)), ("mu = 0", powers_for(0.0)))
    )
    quick = "" if one.gap == GAP_WITHOUT_MU else ", quick"
    return (
        f"{samples.name}, {one.n} workers, d = {samples.d}, K = {one.sent.up}, at most {BUDGET:,} "
        f"coordinates for {', '.join(PAPER)} and {BUDGET_OF_OTHERS:,} for the others, step sizes "
        f"{steps}{quick}"
    )


def race(
    setting: Setting, methods: Sequence[str], seeds: Sequence[int], table: ResultTable
) -> None:
    """Run what the table lacks; save each run, with the curve of each method's first one."""
    print(f"\n{setting.n} workers, mu = {setting.mu:g}: f - f* <= {setting.gap:g}")
    for method in methods:
        known = where(typed(table.rows), method=method)
        known = [row for row in known if tuple(row[name] for name in SHARED) == setting.shared]
        for power, seed, done in measure(setting, method, seeds, known):
            points = [] if known else curve(done, setting.case(seed)[1])
            table.add((*setting.shared, method, power, seed), outcome(done), points)
            known = [*known, *typed(table.rows[-1:])]
        print(line(known), flush=True)


def measure(
    setting: Setting, method: str, seeds: Sequence[int], known: Sequence[Row]
) -> Iterator[tuple[int, int, MethodRun]]:
    """Run the seeds that the ``known`` rows lack; yield the power, the seed and the run of each."""
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


def run(setting: Setting, method: str, power: int, seed: int) -> MethodRun:
    """Run a method with step size 2^power until it reaches the gap or spends the budget."""
    f, least = setting.case(seed)
    built = METHODS[method](f, Simulated(setting.n, seed), setting.sent, 2.0**power)
    out = MethodRun(built, f.value, least + setting.gap)
    out.advance(setting.budget)
    return out


def outcome(done: MethodRun) -> tuple[Any, ...]:
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
