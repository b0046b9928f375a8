"""Step sizes 2^i: all run side by side, and those that fall far behind are abandoned.

Always the run that has sent least goes on, unless the best one so far was better with an eighth of
that: then it waits, and goes on only if that one fails, which is to diverge or to spend the budget
without reaching the target. So few runs cost much more than the winner, and none is given up
because of one that diverges later, or stalls. It is a rule of thumb: where the best one arrives
late, one that waited might have been cheaper.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from torch import Tensor

from torchcomp.algorithms.method import Method
from torchcomp.algorithms.parameter_server import ServerTraffic
from torchcomp.errors import NonFiniteError, SpecError

POWERS = range(-20, 21)
"""The paper's grid: step sizes 2^i for these i."""

BEHIND = 8.0
"""A run that has sent this many times as much as the best had when it was as good, waits."""

# Accelerated methods swing at first: nobody is judged by fewer iterations.
_SETTLED = 100
_GROWTH = 1.5
_EXPLODED = 1e6


@dataclass(frozen=True)
class Point:
    """One point of a curve.

    Attributes:
        iterations: done so far.
        traffic: sent so far, by one worker and to it.
        value: f at the method's solution.
    """

    iterations: int
    traffic: ServerTraffic
    value: float


@dataclass
class Run:
    """A method on its way.

    Attributes:
        method: the method.
        value: f.
        target: the run ends when f is at most this.
        every: f is looked at after this many iterations.
        curve: what has been seen.
        best: the lowest f so far.
    """

    method: Method
    value: Callable[[Tensor], float]
    target: float = -math.inf
    every: int = 1
    curve: list[Point] = field(default_factory=list, init=False)
    best: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        self._note(self.value(self.method.solution))

    @property
    def cost(self) -> int:
        """Coordinates sent so far, up and down."""
        return self.method.server.traffic.coordinates

    @property
    def reached(self) -> bool:
        """Whether f has come down to the target."""
        return self.curve[-1].value <= self.target

    @property
    def broken(self) -> bool:
        """Whether f is not a number any more, or far above where it started."""
        return not self.curve[-1].value <= _EXPLODED * max(1.0, abs(self.curve[0].value))

    def advance(self, cost: float) -> None:
        """Run until the target is reached, `cost` coordinates have been sent, or f explodes."""
        while self.cost < cost and not self.reached and not self.broken:
            try:
                for _ in range(self.every):
                    self.method.step()
            except NonFiniteError:
                self._note(math.inf)
                return
            self._note(self.value(self.method.solution))

    def value_at(self, cost: float) -> float:
        """The last value of the curve that took at most `cost` coordinates."""
        seen = bisect_right(self.curve, cost, key=lambda point: point.traffic.coordinates)
        return self.curve[seen - 1].value if seen else math.inf

    def _note(self, value: float) -> None:
        traffic = replace(self.method.server.traffic)
        self.curve.append(Point(self.method.iterations, traffic, value))
        self.best = min(self.best, value)


@dataclass(frozen=True)
class Tuned:
    """The outcome of a tuning.

    Attributes:
        power: the winner's i, of the step size 2^i.
        run: the winner's run.
        abandoned: for each other i, the coordinates after which it was left.
    """

    power: int
    run: Run
    abandoned: dict[int, int]


def tune(
    build: Callable[[float], Method],
    value: Callable[[Tensor], float],
    *,
    target: float,
    budget: int,
    powers: Iterable[int] = POWERS,
    every: int = 1,
) -> Tuned:
    """The step size 2^i that takes f to the target with the fewest coordinates.

    Where none gets there within the budget, the one with the lowest f wins.

    Args:
        build: makes a fresh method of a step size.
        value: f.
        target: value of f to reach.
        budget: coordinates, up and down, that a run may send.
        powers: the i to try.
        every: iterations between two looks at f.

    Raises:
        SpecError: if there is nothing to try.
    """
    runs = {i: Run(build(2.0**i), value, target, every) for i in powers}
    if not runs:
        raise SpecError("powers is empty: there is no step size to try", "powers")
    while racing := _racing(runs.values(), budget):
        run = min(racing, key=lambda run: run.cost)
        run.advance(min(_cap(runs.values(), budget), _GROWTH * run.cost + 1))
    sound = [i for i, run in runs.items() if not run.broken]
    if not sound:
        raise SpecError(f"every step size of 2^{sorted(runs)} diverged", "powers")
    power = min(sound, key=lambda i: _rank(runs[i]))
    return Tuned(power, runs[power], {i: run.cost for i, run in runs.items() if i != power})


def _cap(runs: Collection[Run], budget: float) -> float:
    """What a run may send that still wants to win."""
    return min([budget, *(run.cost for run in runs if run.reached)])


def _racing(runs: Collection[Run], budget: float) -> list[Run]:
    cap = _cap(runs, budget)
    going = [run for run in runs if not run.broken and not run.reached and run.cost < cap]
    contenders = [*going, *(run for run in runs if run.reached)]
    leader = min(contenders, key=lambda run: run.curve[-1].value, default=None)
    return [run for run in going if not _behind(run, leader)]


def _behind(run: Run, leader: Run | None) -> bool:
    if leader is None or run.method.iterations < _SETTLED:
        return False
    # Runs may swing. The leader must be as good now as it was then; the others, to be safe from
    # waiting, need only have been so once.
    return run.best > max(leader.value_at(run.cost / BEHIND), leader.curve[-1].value)


def _rank(run: Run) -> tuple[float, float]:
    last = run.curve[-1].value
    return (run.cost, last) if run.reached else (math.inf, last)
