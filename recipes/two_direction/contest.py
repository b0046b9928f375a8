"""The methods side by side on one problem, each with the best step size 2^i of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from recipes.two_direction.data_sets import RecipeError, Samples
from recipes.two_direction.softmax_regression import Problem, minimise, problem
from recipes.two_direction.tuning import POWERS, Point, Run, Tuned, tune
from torchcomp.algorithms.agd import AGD, ConstantMomentumAGD
from torchcomp.algorithms.diana import DIANA
from torchcomp.algorithms.ef14 import EF14
from torchcomp.algorithms.ef21 import EF21
from torchcomp.algorithms.ef21p import EF21P
from torchcomp.algorithms.ef21p_diana import EF21PDIANA
from torchcomp.algorithms.method import Method
from torchcomp.algorithms.parameter_server import ParameterServer, Simulated
from torchcomp.algorithms.two_direction import TwoDirectionMethod
from torchcomp.compressors import RandK, TopK

Build = Callable[[Problem, ParameterServer, int, float], Method]


def _two_direction(given: Problem, server: ParameterServer, k: int, step: float) -> Method:
    up, down = RandK(k=k, unbiased=True), TopK(k=k)
    gradients = given.gradients(server.mine)
    return TwoDirectionMethod(gradients, _x0(given), server, up, down, lbar=1 / step, mu=given.mu)


def _ef21p_diana(given: Problem, server: ParameterServer, k: int, step: float) -> Method:
    up, down = RandK(k=k, unbiased=True), TopK(k=k)
    return EF21PDIANA(given.gradients(server.mine), _x0(given), server, up, down, gamma=step)


def _agd(given: Problem, server: ParameterServer, k: int, step: float) -> Method:
    return ConstantMomentumAGD(
        given.gradients(server.mine), _x0(given), server, gamma=step, mu=given.mu
    )


def _three_sequences(given: Problem, server: ParameterServer, k: int, step: float) -> Method:
    return AGD(given.gradients(server.mine), _x0(given), server, lbar=1 / step, mu=given.mu)


def _diana(given: Problem, server: ParameterServer, k: int, step: float) -> Method:
    up = RandK(k=k, unbiased=True)
    return DIANA(given.gradients(server.mine), _x0(given), server, up, gamma=step)


def _ef21(given: Problem, server: ParameterServer, k: int, step: float) -> Method:
    return EF21(given.gradients(server.mine), _x0(given), server, TopK(k=k), gamma=step)


def _ef14(given: Problem, server: ParameterServer, k: int, step: float) -> Method:
    return EF14(given.gradients(server.mine), _x0(given), server, TopK(k=k), gamma=step)


def _ef21p(given: Problem, server: ParameterServer, k: int, step: float) -> Method:
    return EF21P(given.gradients(server.mine), _x0(given), server, TopK(k=k), gamma=step)


def _x0(given: Problem) -> torch.Tensor:
    return torch.zeros(given.d, dtype=torch.float64)


METHODS: dict[str, Build] = {
    "2Direction": _two_direction,
    "AGD": _agd,
    "EF21-P + DIANA": _ef21p_diana,
    "AGD, three sequences": _three_sequences,
    "DIANA": _diana,
    "EF21-P": _ef21p,
    "EF21": _ef21,
    "EF14": _ef14,
}
# Of the accelerated methods, whose step size may not exceed 1/mu.
_NEED_MU = ("2Direction", "AGD", "AGD, three sequences")
# So many steps smaller than the tuned one are tried where a seed fails with that.
_SMALLER = 3


@dataclass(frozen=True, eq=False)
class Setting:
    """One experiment."""

    samples: Samples
    n: int
    mu: float
    k: int
    gap: float
    budget: int
    every: int = 1
    powers: range = POWERS

    def problem(self, seed: int) -> Problem:
        """Return the problem on the shards that ``seed`` shuffles."""
        return _case(self, seed)[0]

    def least(self, seed: int) -> float:
        """Return f*, the lowest value of that problem."""
        return _case(self, seed)[1]


@lru_cache(maxsize=8)
def _case(setting: Setting, seed: int) -> tuple[Problem, float]:
    given = problem(setting.samples.shards(setting.n, seed), setting.mu)
    return given, minimise(given)


@dataclass(frozen=True)
class Result:
    """What a run came to: the traffic of one worker until the gap was reached, if it was."""

    method: str
    power: int
    seed: int
    reached: bool
    last: Point

    @classmethod
    def of(cls, method: str, power: int, seed: int, run: Run) -> "Result":
        """Summarise a run."""
        return cls(method, power, seed, run.reached, run.curve[-1])


def powers(setting: Setting, method: str) -> list[int]:
    """Return the i of the step sizes 2^i that the method can take."""
    return [i for i in setting.powers if method not in _NEED_MU or 2.0**i * setting.mu <= 1]


def check(setting: Setting, methods: list[str]) -> None:
    """Require f* and every method to be there, before anything is measured.

    Raises:
        RecipeError: if f* cannot be found, or no step size is left to a method.
        SpecError: if a method refuses its compressors.
    """
    setting.least(0)
    for method in methods:
        if not (steps := powers(setting, method)):
            raise RecipeError(
                f"no step from 2^{setting.powers[0]} to 2^{setting.powers[-1]} is left to "
                f"{method}, whose step may not exceed 1/mu = {1 / setting.mu:g}"
            )
        METHODS[method](setting.problem(0), Simulated(setting.n), setting.k, 2.0 ** steps[0])


def tuned(setting: Setting, method: str) -> Tuned:
    """Find a method's step size on the problem of seed 0."""
    given = setting.problem(0)
    return tune(
        lambda step: METHODS[method](given, Simulated(setting.n), setting.k, step),
        given.value,
        target=setting.least(0) + setting.gap,
        budget=setting.budget,
        powers=powers(setting, method),
        every=setting.every,
    )


def run(
    setting: Setting, method: str, power: int, seed: int, server: ParameterServer | None = None
) -> Run:
    """Run a method with step size 2^power until the gap is reached or the budget spent."""
    given = setting.problem(seed)
    target = setting.least(seed) + setting.gap
    built = METHODS[method](given, server or Simulated(setting.n, seed), setting.k, 2.0**power)
    out = Run(built, given.value, target, setting.every)
    out.advance(setting.budget)
    return out


def run_all(setting: Setting, method: str, seeds: int) -> tuple[int, list[Run]]:
    """Tune with seed 0 and run with every seed; return the power and the runs.

    Where f swings, seed 0 may arrive by chance with a step that is too large for the others: then
    the next smaller ones are tried, and the first with which all seeds arrive is taken. If there is
    none it stays with the tuned one, and if seed 0 does not arrive, with that run alone.
    """
    best = tuned(setting, method)
    if not best.run.reached:
        return best.power, [best.run]
    runs = [best.run, *(run(setting, method, best.power, seed) for seed in range(1, seeds))]
    if all(each.reached for each in runs):
        return best.power, runs
    for power in range(best.power - 1, best.power - 1 - _SMALLER, -1):
        if power in setting.powers and (arrived := _all_arrive(setting, method, power, seeds)):
            return power, arrived
    return best.power, runs


def _all_arrive(setting: Setting, method: str, power: int, seeds: int) -> list[Run]:
    """The runs of all seeds; none as soon as one does not arrive."""
    runs = []
    for seed in range(seeds):
        runs.append(run(setting, method, power, seed))
        if not runs[-1].reached:
            return []
    return runs
