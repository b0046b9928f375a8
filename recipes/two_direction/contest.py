"""Softmax regression: what a worker sends and receives until f is within a gap of its infimum."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from recipes.two_direction.data_sets import Samples
from recipes.two_direction.methods import Messages, Problem
from recipes.two_direction.race import Race, Setting
from recipes.two_direction.softmax_regression import minimise, problem

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


@dataclass(frozen=True)
class Options:
    """What replaces the contest's own choices, where it is not None.

    Attributes:
        gap: f - f* to reach.
        budget: coordinates that a run can send.
        powers: the i of the step sizes 2^i to try.
    """

    gap: float | None = None
    budget: int | None = None
    powers: range | None = None


def powers(mu: float) -> range:
    """Return the i of the step sizes 2^i to try.

    No best one of the contest is at an end, except at 1/mu, the largest of accelerated methods.
    """
    # Without a regulariser, f becomes ever flatter on the way, so larger steps are stable.
    return range(-4, 9) if mu else range(17)


def setting(
    samples: Samples, n: int, mu: float, sent: Messages, options: Options = Options()
) -> Setting:
    """Return softmax regression on n workers.

    Args:
        samples: the data.
        n: number of workers.
        mu: weight of the regulariser.
        sent: the compressed messages.
        options: what replaces the contest's own choices.
    """
    gap = options.gap or (GAP if mu else GAP_WITHOUT_MU)
    steps = options.powers or powers(mu)

    # The minimisation takes seconds, and every method needs the same f*.
    @lru_cache(maxsize=16)
    def case(seed: int) -> tuple[Problem, float]:
        f = problem(samples.shards(n, seed), mu)
        return f, minimise(f, gap / 100)

    return Setting(samples.name, case, n, mu, sent, gap, options.budget or BUDGET, steps)


def tenth(samples: Samples) -> Messages:
    """Return messages of a tenth of the coordinates in both directions."""
    k = max(1, samples.d // 10)
    return Messages(k, k)


def contest_races(
    samples: Samples,
    n: int,
    sent: Messages,
    mus: Sequence[float],
    methods: Sequence[str],
    options: Options,
) -> list[Race]:
    """Return the races on n workers: those of the paper's methods first, then the others."""
    first = [setting(samples, n, mu, sent, options) for mu in mus]
    then = [replace(each, budget=options.budget or BUDGET_OF_OTHERS) for each in first]
    races: list[Race] = [
        *((each, [name for name in methods if name in PAPER]) for each in first),
        *((each, [name for name in methods if name not in PAPER]) for each in then),
    ]
    return [race for race in races if race[1]]


def task(samples: Samples, n: int, sent: Messages, options: Options) -> str:
    """Return what all races on n workers share, for the head of their table."""
    budget = (
        f"at most {options.budget:,} coordinates"
        if options.budget
        else f"at most {BUDGET:,} coordinates for {', '.join(PAPER)} and {BUDGET_OF_OTHERS:,} "
        "for the others"
    )
    ranges = (
        {"": options.powers}
        if options.powers
        else {" for mu > 0": powers(1.0), " for mu = 0": powers(0.0)}
    )
    steps = ", ".join(f"2^{own[0]} to 2^{own[-1]}{name}" for name, own in ranges.items())
    sizes = f"{n} workers, d = {samples.d}, K = {sent.k_up}"
    gap = f", gap {options.gap:g}" if options.gap else ""
    return f"{samples.name}, {sizes}, {budget}, step sizes {steps}{gap}"
