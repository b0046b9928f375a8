"""Tuning of step sizes 2^i: run all candidates side by side and pause those that fall far behind.

Advance the cheapest candidate, in small portions. Pause it if the best one so far was better at an
eighth of its cost. Resume it only if that best one fails: it diverges, or spends its budget without
reaching the target. This is a heuristic: a paused one might have been cheaper.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from torch import Tensor

from torchcomp.specs.errors import NonFiniteError, SpecError
from torchcomp.two_direction.method import Method
from torchcomp.two_direction.parameter_server import ServerTraffic

BEHIND = 8.0
"""Pause a run if the best one was as good with this many times less traffic."""

# Accelerated methods oscillate at first, so compare no run before this many iterations.
_SETTLED = 100
# Grow the portions geometrically: equal portions would compare all candidates far more often.
_GROWTH = 1.5
_RESOLUTION = 100
# f may rise by large factors and still converge, so a small limit would end good runs.
_EXPLODED = 1e6


@dataclass(frozen=True)
class Point:
    iterations: int  # done so far
    traffic: ServerTraffic  # what one worker sent and received so far
    value: float  # f at the method's solution


@dataclass
class MethodRun:
    """A run of a method with one step size, which can be advanced in portions."""

    method: Method  # the method
    value: Callable[[Tensor], float]  # f
    target: float = -math.inf  # the run ends when f is at most this
    curve: list[Point] = field(default_factory=list, init=False)  # the points so far
    best: float = field(default=math.inf, init=False)  # the lowest f so far

    def __post_init__(self) -> None:
        self._append(self.value(self.method.x))

    @property
    def cost(self) -> int:
        """Coordinates sent so far, up and down."""
        return self.method.server.traffic.coordinates

    @property
    def reached(self) -> bool:
        """Whether f is at or below the target."""
        return self.curve[-1].value <= self.target

    @property
    def broken(self) -> bool:
        """Whether f is NaN, or far above its initial value."""
        # The negation is also true for NaN.
        return not self.curve[-1].value <= _EXPLODED * max(1.0, abs(self.curve[0].value))

    def advance(self, cost: float) -> None:
        """Run until the target is reached, ``cost`` coordinates have been sent, or f explodes."""
        while self.cost < cost and not self.reached and not self.broken:
            try:
                for _ in range(max(1, self.method.iterations // _RESOLUTION)):
                    self.method.step()
            except NonFiniteError:
                # The method raises before f is evaluated. Infinity marks the run as broken.
                self._append(math.inf)
                return
            self._append(self.value(self.method.x))

    def value_at(self, cost: float) -> float:
        """Return the last value of the curve that took at most ``cost`` coordinates."""
        index = bisect_right(self.curve, cost, key=lambda point: point.traffic.coordinates)
        return self.curve[index - 1].value if index else math.inf

    def _append(self, value: float) -> None:
        # The server updates its traffic in place, so the point needs a copy.
        traffic = replace(self.method.server.traffic)
        self.curve.append(Point(self.method.iterations, traffic, value))
        self.best = min(self.best, value)


@dataclass(frozen=True)
class Tuned:
    power: int  # the winner's i, of the step size 2^i
    run: MethodRun  # the winner's run


def tune(
    build: Callable[[float], Method],
    value: Callable[[Tensor], float],
    *,
    target: float,
    budget: int,
    powers: Iterable[int],
) -> Tuned:
    """Return the step size 2^i that takes f to the target with the fewest coordinates.

    If none reaches it within the budget, the one with the lowest f wins.
    """
    runs = {i: MethodRun(build(2.0**i), value, target) for i in powers}
    if not runs:
        raise SpecError("powers is empty: expected at least one i of a step size 2^i", "powers")
    while racing := _racing(runs.values(), budget):
        run = min(racing, key=lambda run: run.cost)
        # Add 1, because a run that has sent nothing would otherwise never start.
        run.advance(min(_cap(runs.values(), budget), _GROWTH * run.cost + 1))
    finite = [i for i, run in runs.items() if not run.broken]
    if not finite:
        raise SpecError(f"every step size of 2^{sorted(runs)} diverged", "powers")
    power = min(finite, key=lambda i: _rank(runs[i]))
    return Tuned(power, runs[power])


def _cap(runs: Collection[MethodRun], budget: float) -> float:
    return min([budget, *(run.cost for run in runs if run.reached)])


def _racing(runs: Collection[MethodRun], budget: float) -> list[MethodRun]:
    cap = _cap(runs, budget)
    going = [run for run in runs if not run.broken and not run.reached and run.cost < cap]
    # A run that has spent its budget has failed, so it no longer pauses others.
    contenders = [*going, *(run for run in runs if run.reached)]
    leader = min(contenders, key=lambda run: run.curve[-1].value, default=None)
    return [run for run in going if not _behind(run, leader)]


def _behind(run: MethodRun, leader: MethodRun | None) -> bool:
    if leader is None or run.method.iterations < _SETTLED:
        return False
    # Runs can oscillate. The leader must still be as good as it was at an eighth of the cost. For
    # the other run, its best value counts, so that one bad moment does not pause it.
    return run.best > max(leader.value_at(run.cost / BEHIND), leader.curve[-1].value)


def _rank(run: MethodRun) -> tuple[float, float]:
    last = run.curve[-1].value
    return (run.cost, last) if run.reached else (math.inf, last)
