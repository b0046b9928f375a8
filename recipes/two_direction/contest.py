"""The digits and the paper's data: what a worker sends and receives until f is within a gap of f*.

* ``contest``: by regulariser and number of workers.
* ``alpha``: by size of the server's message, and by its price r. A worker pays (1 - r) up + r down
  for its coordinates. 2Direction's coin then has the probability p for r. With equal messages in
  both directions that p is the default, 1/(omega + 1), so the messages are smaller downwards.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from recipes.experiments import ResultTable
from recipes.two_direction.data_sets import Samples, open_samples
from recipes.two_direction.methods import METHODS, Messages, Problem
from recipes.two_direction.race import (
    CURVE,
    CURVE_OF,
    OUTCOME,
    RUN,
    Race,
    Setting,
    check,
    race,
)
from recipes.two_direction.softmax_regression import SoftmaxRegression, minimise
from recipes.two_direction.theory import Probabilities, priced_probabilities

MUS = (0.0, 1e-4, 1e-3, 1e-2)
WORKERS = (10, 100)
GAP, GAP_WITHOUT_MU = 1e-6, 1e-3
"""f - f* to reach. Without a regulariser, f - f* falls too slowly to reach 1e-6."""
BUDGET = 1_000_000
"""Coordinates that a run can send."""
PAPER = ("2Direction", "AGD", "AGD, three sequences", "EF21-P + DIANA")
"""The methods of the paper's own comparison, and AGD's other form."""
BUDGET_OF_OTHERS = 300_000
"""The same for the other methods, which need more than those of the paper in most settings."""

DIGITS_D = 650
PRICES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
"""The values of r."""
K_UP = 65
K_DOWNS = (7, 33, 65, 195, 650)
PRICED_K_DOWNS = (33, 7)
"""The values of the server's message, for the sweep of r."""
_ALPHA_MU, _ALPHA_WORKERS, _QUICK_GAP = 1e-3, 10, 1e-1
# Up to the largest step that accelerated methods allow, 1/mu.
_ALPHA_POWERS = range(-4, 10)

Measure = Callable[[], None]


def powers(mu: float) -> range:
    """Return the i of the step sizes 2^i to try.

    No best one of the contest is at an end, except at 1/mu, the largest of accelerated methods.
    """
    # Without a regulariser, f becomes ever flatter on the way, so larger steps are stable.
    return range(-4, 9) if mu else range(17)


def setting(
    samples: Samples,
    n: int,
    mu: float,
    sent: Messages | None = None,
    gap: float | None = None,
    steps: range | None = None,
) -> Setting:
    """Return softmax regression on n workers; by default, messages of a tenth of d both ways."""
    gap = gap or (GAP if mu else GAP_WITHOUT_MU)
    tenth = max(1, samples.d // 10)

    # The minimisation takes seconds, and every method needs the same f*.
    @lru_cache(maxsize=16)
    def case(seed: int) -> tuple[Problem, float]:
        f = SoftmaxRegression(samples.shards(n, seed), mu)
        return f, minimise(f, gap / 100)

    sent = sent or Messages(tenth, tenth)
    return Setting(samples.name, case, n, mu, sent, gap, BUDGET, steps or powers(mu))


def open_contest(arguments: argparse.Namespace) -> Measure:
    """Check the flags of the contest, and return what measures it."""
    samples = open_samples(arguments.dataset, arguments.data)
    k = arguments.k or max(1, samples.d // 10)
    methods = arguments.methods or [*METHODS]
    parts: list[tuple[ResultTable, list[Race]]] = []
    for n in arguments.workers:
        first = [
            setting(samples, n, mu, Messages(k, k), arguments.gap, arguments.powers)
            for mu in arguments.mu
        ]
        budgets = (arguments.budget or BUDGET, arguments.budget or BUDGET_OF_OTHERS)
        races: list[Race] = [
            (replace(each, budget=budget), own)
            for budget, own in zip(budgets, _divided(methods), strict=True)
            for each in first
            if own
        ]
        table = ResultTable(
            arguments.out / f"contest_{samples.name}_n{n}.csv",
            *(RUN, OUTCOME, _task(samples, n, k, arguments)),
            resume=arguments.resume,
            curve=CURVE,
            curve_of=CURVE_OF,
        )
        parts.append((table, races))
    return checked(parts, arguments)


def _divided(methods: list[str]) -> tuple[list[str], list[str]]:
    """Return the paper's methods and the others."""
    return [m for m in methods if m in PAPER], [m for m in methods if m not in PAPER]


def _task(samples: Samples, n: int, k: int, arguments: argparse.Namespace) -> str:
    budget = (
        f"at most {arguments.budget:,} coordinates"
        if arguments.budget
        else f"at most {BUDGET:,} coordinates for {', '.join(PAPER)} and {BUDGET_OF_OTHERS:,} "
        "for the others"
    )
    ranges = (
        {"": arguments.powers}
        if arguments.powers
        else {" for mu > 0": powers(1.0), " for mu = 0": powers(0.0)}
    )
    steps = ", ".join(f"2^{own[0]} to 2^{own[-1]}{name}" for name, own in ranges.items())
    sizes = f"{n} workers, d = {samples.d}, K = {k}"
    gap = f", gap {arguments.gap:g}" if arguments.gap else ""
    return f"{samples.name}, {sizes}, {budget}, step sizes {steps}{gap}"


def open_alpha(arguments: argparse.Namespace) -> Measure:
    """Return what measures the races by size and by price of the server's message."""
    gap = _QUICK_GAP if arguments.quick else GAP
    steps = f"step sizes 2^{_ALPHA_POWERS[0]} to 2^{_ALPHA_POWERS[-1]}"
    where = f"digits, {_ALPHA_WORKERS} workers, mu = {_ALPHA_MU:g}, f - f* to {gap:g}"
    task = f"{where}, at most {BUDGET:,} coordinates, {steps}"
    path = arguments.out / "alpha.csv"
    table = ResultTable(path, RUN, OUTCOME, task, resume=arguments.resume)
    # One setting for all sizes of messages: f* is then found once.
    base = setting(open_samples(), _ALPHA_WORKERS, _ALPHA_MU, None, gap, _ALPHA_POWERS)
    return checked([(table, _alpha_races(base, quick=arguments.quick))], arguments)


def _alpha_races(base: Setting, *, quick: bool) -> list[Race]:
    races: list[Race] = [
        # AGD's messages are dense: one race is enough.
        (replace(base, sent=Messages(K_UP, K_DOWNS[0])), ("AGD", "AGD, three sequences"))
    ]
    for k in K_DOWNS[1:3] if quick else K_DOWNS:
        races.append((replace(base, sent=Messages(K_UP, k)), ("EF21-P + DIANA", "2Direction")))
    for k in K_DOWNS[1:2] if quick else PRICED_K_DOWNS:
        chances = (chance(Messages(K_UP, k), r) for r in PRICES)
        # Several prices can have the same probability.
        for own in dict.fromkeys(each for each in chances if each):
            races.append((replace(base, sent=Messages(K_UP, k, own)), ("2Direction",)))
    return races


def chance(sent: Messages, r: float) -> Probabilities | None:
    """Return 2Direction's probabilities for a price r, or None if they are its default."""
    omega = DIGITS_D / sent.k_up - 1
    found = priced_probabilities(omega, d=DIGITS_D, k_up=sent.k_up, k_down=sent.k_down, r=r)
    # The default is p = tau = 1/(omega + 1).
    return None if math.isclose(found.p, 1 / (omega + 1)) else found


def checked(parts: list[tuple[ResultTable, list[Race]]], arguments: argparse.Namespace) -> Measure:
    """Check all races before the first one, and return what runs them."""
    for _, races in parts:
        for each, methods in races:
            check(each, methods, arguments.seeds)

    def measure() -> None:
        for table, races in parts:
            for each, methods in races:
                race(each, methods, arguments.seeds, table)

    return measure
