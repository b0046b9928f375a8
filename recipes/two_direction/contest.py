"""Eight methods on one problem, each with its best step size 2^i."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from recipes.errors import RecipeError
from recipes.two_direction.data_sets import Samples
from recipes.two_direction.softmax_regression import Problem, minimise, problem
from recipes.two_direction.tuning import POWERS, MethodRun, Tuned, tune
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


def _two_direction(f: Problem, server: ParameterServer, k: int, step: float) -> Method:
    up, down = RandK(k=k, unbiased=True), TopK(k=k)
    gradients = f.gradients(server.mine)
    return TwoDirectionMethod(gradients, _x0(f), server, up, down, lbar=1 / step, mu=f.mu)


def _ef21p_diana(f: Problem, server: ParameterServer, k: int, step: float) -> Method:
    up, down = RandK(k=k, unbiased=True), TopK(k=k)
    return EF21PDIANA(f.gradients(server.mine), _x0(f), server, up, down, gamma=step)


def _agd(f: Problem, server: ParameterServer, k: int, step: float) -> Method:
    return ConstantMomentumAGD(f.gradients(server.mine), _x0(f), server, gamma=step, mu=f.mu)


def _three_sequences(f: Problem, server: ParameterServer, k: int, step: float) -> Method:
    return AGD(f.gradients(server.mine), _x0(f), server, lbar=1 / step, mu=f.mu)


def _diana(f: Problem, server: ParameterServer, k: int, step: float) -> Method:
    up = RandK(k=k, unbiased=True)
    return DIANA(f.gradients(server.mine), _x0(f), server, up, gamma=step)


def _ef21(f: Problem, server: ParameterServer, k: int, step: float) -> Method:
    return EF21(f.gradients(server.mine), _x0(f), server, TopK(k=k), gamma=step)


def _ef14(f: Problem, server: ParameterServer, k: int, step: float) -> Method:
    return EF14(f.gradients(server.mine), _x0(f), server, TopK(k=k), gamma=step)


def _ef21p(f: Problem, server: ParameterServer, k: int, step: float) -> Method:
    return EF21P(f.gradients(server.mine), _x0(f), server, TopK(k=k), gamma=step)


def _x0(f: Problem) -> torch.Tensor:
    return torch.zeros(f.d, dtype=torch.float64)


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
# The accelerated methods. Their step size cannot exceed 1/mu.
_NEED_MU = ("2Direction", "AGD", "AGD, three sequences")
# If a seed fails with the tuned step size, try this many smaller ones.
_SMALLER = 3


@dataclass(frozen=True, eq=False)
class Setting:
    """The problem, the compressors and the limits that all methods share.

    Attributes:
        samples: the data set.
        n: number of workers.
        mu: weight of the regulariser, and the strong convexity.
        k: number of values in a compressed message.
        gap: a run ends when f - f* is at most this.
        budget: coordinates, up and down, that a run can send.
        every: number of iterations between two evaluations of f.
        powers: the i of the step sizes 2^i to try.
    """

    samples: Samples
    n: int
    mu: float
    k: int
    gap: float
    budget: int
    every: int = 1
    powers: range = POWERS

    def __str__(self) -> str:
        sizes = f"{self.n} workers, d = {self.samples.d}, K = {self.k}"
        return f"{self.samples.name}, {sizes}, mu = {self.mu:g}"

    def task(self, seeds: int) -> str:
        """Return all settings of the contest, for the head of its tables."""
        limits = f"f - f* <= {self.gap:g}, at most {self.budget:,} coordinates"
        steps = f"step sizes 2^{self.powers[0]} to 2^{self.powers[-1]}"
        return f"{self}, {limits}, f every {self.every} iterations, {steps}, {seeds} seeds"

    def problem(self, seed: int) -> Problem:
        """Return the problem on the shards that ``seed`` shuffles."""
        return _case(self, seed)[0]

    def least(self, seed: int) -> float:
        """Return f*, the lowest value of that problem."""
        return _case(self, seed)[1]


# The minimisation takes seconds, and every method needs the same f*.
@lru_cache(maxsize=8)
def _case(setting: Setting, seed: int) -> tuple[Problem, float]:
    f = problem(setting.samples.shards(setting.n, seed), setting.mu)
    return f, minimise(f)


def powers(setting: Setting, method: str) -> list[int]:
    """Return the i of the step sizes 2^i that the method allows."""
    return [i for i in setting.powers if method not in _NEED_MU or 2.0**i * setting.mu <= 1]


def check(setting: Setting, methods: list[str]) -> None:
    """Find f* and construct every method, before anything is measured.

    Raises:
        RecipeError: if f* cannot be found, or a method allows none of the step sizes.
        SpecError: if a method refuses its compressors.
    """
    setting.least(0)
    for method in methods:
        if not (steps := powers(setting, method)):
            raise RecipeError(
                f"--powers {setting.powers[0]} {setting.powers[-1]}: {method} allows no step size "
                f"above 1/mu = {1 / setting.mu:g}; choose a smaller LOW"
            )
        METHODS[method](setting.problem(0), Simulated(setting.n), setting.k, 2.0 ** steps[0])


def tuned(setting: Setting, method: str) -> Tuned:
    """Find the method's step size on the problem of seed 0."""
    f = setting.problem(0)
    return tune(
        lambda step: METHODS[method](f, Simulated(setting.n), setting.k, step),
        f.value,
        target=setting.least(0) + setting.gap,
        budget=setting.budget,
        powers=powers(setting, method),
        every=setting.every,
    )


def run(
    setting: Setting, method: str, power: int, seed: int, server: ParameterServer | None = None
) -> MethodRun:
    """Run a method with step size 2^power until it reaches the gap or spends the budget."""
    f = setting.problem(seed)
    target = setting.least(seed) + setting.gap
    built = METHODS[method](f, server or Simulated(setting.n, seed), setting.k, 2.0**power)
    out = MethodRun(built, f.value, target, setting.every)
    out.advance(setting.budget)
    return out


def run_all(setting: Setting, method: str, seeds: int) -> tuple[int, list[MethodRun]]:
    """Tune with seed 0 and run with every seed; return the power and the runs.

    If a seed does not reach the gap with the tuned step size, the next smaller ones are tried. The
    first one with which all seeds reach the gap is used. If there is none, the tuned one stays. If
    seed 0 does not reach the gap, its run is the only one.
    """
    best = tuned(setting, method)
    if not best.run.reached:
        return best.power, [best.run]
    runs = [best.run, *(run(setting, method, best.power, seed) for seed in range(1, seeds))]
    if all(each.reached for each in runs):
        return best.power, runs
    # f can oscillate, and seed 0 can reach the gap by chance with a step that is too large.
    for power in range(best.power - 1, best.power - 1 - _SMALLER, -1):
        if power in setting.powers and (reached := _all_reached(setting, method, power, seeds)):
            return power, reached
    return best.power, runs


def _all_reached(setting: Setting, method: str, power: int, seeds: int) -> list[MethodRun]:
    """Return the runs of all seeds, or none as soon as one does not reach the gap."""
    runs = []
    for seed in range(seeds):
        runs.append(run(setting, method, power, seed))
        if not runs[-1].reached:
            return []
    return runs
