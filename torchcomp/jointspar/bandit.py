"""The bandit of JointSpar: which layers to keep, learned from the norms of those that were kept.

Source: Liu, Mozafari, "Communication-efficient distributed learning for large batch optimization",
ICML 2022, Algorithms 1 and 2. The costs and the form `Baseline` are ours.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchcomp.checks import (
    check_at_least_0,
    check_count,
    check_fraction,
    check_positive,
    is_number,
)
from torchcomp.errors import NonFiniteError, SpecError
from torchcomp.keys import Key

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]

_MEMORY = 0.95
"""Share of the old baseline in the new one."""

_LARGEST_NORM = 1e100
"""Squares of larger norms, divided by squares of probabilities, may not be finite."""


@dataclass(frozen=True)
class Baseline:
    """The update that works at practical lengths; the default.

    With Z the layers kept, g their gradients, c the costs, C the budget:

    1. r_d = Z_d (|g_d|^2 / (c_d p_d^2 lam) - 1)
    2. u = log p + clip(alpha r / p, -1, 1)
    3. p = kl_project(u, C, p_min, c)
    4. lam <- 0.95 lam + 0.05 (1/C) sum over the kept of |g_d|^2 / p_d^2

    lam replaces the constant L^2 / p_min^2 of the paper's form: at the optimum |g_d|^2 / (c_d
    p_d^2) equals lam for all layers, so r has mean 0 there. r and alpha are free of units. lam is
    corrected for its start at 0, as in Adam.
    """

    alpha: float = 0.01  # step size; 0.003 to 0.03 work

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)

    def exponent(self, bandit: "Bandit", kept: Mask, norms: Vector) -> Vector:
        """What is added to log p."""
        p, level = bandit.p, bandit.level
        if level == 0:
            return np.zeros(len(p))
        reward = np.where(kept, norms**2 / (bandit.costs * p**2 * level) - 1, 0.0)
        return np.asarray(np.clip(self.alpha * reward / p, -1.0, 1.0))


@dataclass(frozen=True)
class Literal:
    """Algorithm 1 as the paper states it.

    1. l_d = -|g_d|^2 / p_d^2 + L^2 / p_min^2 for the layers kept, else 0
    2. w_d = p_d exp(-alpha_p l_d / p_d)
    3. p = argmin KL(q || w) over {sum q = S, p_min <= q_d <= 1}

    The constant punishes whatever was kept, so p hardly learns within thousands of steps. L is the
    largest |g_d| seen, or `bound` (at most 1e100) where that is larger.
    """

    alpha: float  # alpha_p, in units of 1 / |g|^2
    bound: float | None = None  # in units of |g|; None is 0

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)
        bound, most = self.bound, _LARGEST_NORM
        if not (bound is None or (is_number(bound) and 0 < bound <= most)):
            raise SpecError(
                f"bound must be a number above 0 and at most {most:g}, or None, not {bound!r}",
                "bound",
            )

    def exponent(self, bandit: "Bandit", kept: Mask, norms: Vector) -> Vector:
        """What is added to log p."""
        p, bound = bandit.p, max(bandit.largest, self.bound or 0.0)
        loss = np.where(kept, bound**2 / bandit.p_min**2 - norms**2 / p**2, 0.0)
        return np.asarray(-self.alpha * loss / p)


class Bandit:
    """Keep probabilities p, float64 (D,), updated by online mirror descent (Algorithm 1).

    p approaches clip(const |g_d| / sqrt(c_d), p_min, 1) with sum c p = C, which minimises the
    variance sum |g_d|^2 / p_d of the estimate g_d / p_d within the budget. It starts at C / sum c.

    Args:
        costs: c, what keeping each layer costs, finite and above 0, 1-D of D.
        budget: C, the expected cost of a step, from p_min sum(c) to sum(c).
        p_min: least probability, above 0 and at most 1.
        rule: the form of the update; None is ``Baseline()``.

    Raises:
        SpecError: if an argument is out of its range or the budget is infeasible.
    """

    def __init__(
        self, costs: ArrayLike, budget: float, p_min: float, rule: Baseline | Literal | None = None
    ) -> None:
        self.costs = _above_0(costs, "costs")
        _check_budget(budget, p_min, self.costs)
        self.budget, self.p_min, self.rule = budget, p_min, rule or Baseline()
        if isinstance(self.rule, Literal) and np.ptp(self.costs):
            raise SpecError(
                "the literal form counts layers, and these costs differ: use the baseline form"
            )
        self.p = np.full(len(self.costs), min(1.0, budget / float(self.costs.sum())))
        self.largest, self._average, self._updates = 0.0, 0.0, 0

    @property
    def level(self) -> float:
        """The baseline lam, corrected for its start; 0 before any norm was seen."""
        return self._average / (1 - _MEMORY**self._updates) if self._updates else 0.0

    def update(self, kept: Mask, norms: ArrayLike) -> None:
        """Learn from one step that kept these layers, with |g_d| before the division by p.

        Raises:
            NonFiniteError: if the norm of a kept layer is NaN, negative or above 1e100; p stays.
        """
        norms = np.where(kept, np.asarray(norms, dtype=np.float64), 0.0)
        sound = (norms >= 0) & (norms <= _LARGEST_NORM)
        if not sound.all():
            d = sound.argmin()
            raise NonFiniteError(
                f"the norm of layer {d} is {norms[d]}, and must be from 0 to {_LARGEST_NORM:g}: "
                "the probabilities stay as they were"
            )
        self.largest = max(self.largest, float(norms.max()))
        exponent = self.rule.exponent(self, kept, norms)
        seen = float((norms**2 / self.p**2).sum()) / self.budget
        self.p = kl_project(np.log(self.p) + exponent, self.budget, self.p_min, self.costs)
        self._average = _MEMORY * self._average + (1 - _MEMORY) * seen
        self._updates += 1

    def state_dict(self) -> dict[str, Any]:
        """All that the next update depends on, as plain numbers."""
        seen = {"largest": self.largest, "average": self._average, "updates": self._updates}
        return {"p": self.p.tolist(), **seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; nothing changes on error.

        Raises:
            SpecError: if it lacks something, is of another number of layers, budget or p_min, or
                holds an impossible value.
        """
        missing = [key for key in self.state_dict() if key not in state]
        if missing:
            raise SpecError(f"the bandit's state lacks {', '.join(missing)}")
        p = check_vector(state["p"], "p", len(self.p), self.p_min, 1.0)
        spent = float(self.costs @ p)
        if not math.isclose(spent, self.budget, rel_tol=1e-6):
            raise SpecError(f"p costs {spent:g}, and the budget is {self.budget:g}", "p")
        check_at_least_0("largest", state["largest"])
        check_at_least_0("average", state["average"])
        check_count("updates", state["updates"], least=0)
        self.p, self.largest = p, state["largest"]
        self._average, self._updates = state["average"], state["updates"]


def sample(p: Vector, key: Key, *, shared: bool = True) -> Mask:
    """S_t of Algorithm 2: each layer with its probability, independently; may be empty.

    It depends on the key's seed and step, and on its rank unless all ranks share it.
    """
    generator = key.shared() if shared else key.private()
    return np.asarray(generator.random(len(p)) < p)


def best_probabilities(
    norms: ArrayLike, budget: float, p_min: float, costs: ArrayLike | None = None
) -> Vector:
    """The p that minimises sum |g_d|^2 / p_d over {sum c p = C, p_min <= p <= 1}.

    It is clip(const |g_d| / sqrt(c_d), p_min, 1). Raises as :func:`kl_project`, and SpecError for
    a norm of 0.
    """
    norms = _above_0(norms, "norms")
    costs = np.ones(len(norms)) if costs is None else _above_0(costs, "costs")
    return kl_project(np.log(norms) - np.log(costs) / 2, budget, p_min, costs)


def kl_project(u: ArrayLike, budget: float, p_min: float, costs: ArrayLike | None = None) -> Vector:
    """The point of {sum c q = budget, p_min <= q <= 1} that is nearest to the weights exp(u).

    Nearest means least sum of c_d KL(q_d || exp(u_d)), with equal costs c the divergence of
    JointSpar's Algorithm 1. The minimiser is q = clip(exp(u + tau), p_min, 1) with one tau for all,
    and sum c q grows with tau. q_d leaves p_min at tau = log p_min - u_d and reaches 1 at tau =
    -u_d: bisection over these 2 D break points finds the two around tau, and between them the
    entries that are not clipped are in closed form. Only differences of u are raised to a power, so
    the result is right at |u| = 1e5.

    Args:
        u: logarithms of the weights, finite, 1-D of D at least 1, like q.
        budget: sum c q; with costs of 1, the expected number of layers S.
        p_min: lower bound of every entry, above 0 and at most 1.
        costs: c, finite and above 0, 1-D of D; ones if left out.

    Raises:
        SpecError: if an argument is out of its range, or no q has this sum.
    """
    u = check_vector(u, "u")
    costs = np.ones(len(u)) if costs is None else _above_0(costs, "costs", len(u))
    _check_budget(budget, p_min, costs)
    size, log_p_min = len(u), math.log(p_min)
    order = np.argsort(np.concatenate([log_p_min - u, -u]), kind="stable")

    def log_q(position: int) -> Vector:
        reached, d = divmod(order[position], size)
        bound = 0.0 if reached else log_p_min
        return np.asarray(np.clip((u - u[d]) + bound, log_p_min, 0.0))

    low, high = 0, 2 * size - 1
    while high - low > 1:
        middle = (low + high) // 2
        if costs @ np.exp(log_q(middle)) <= budget:
            low = middle
        else:
            high = middle
    # What is at the same bound at both ends is at it in between; all else moves with tau.
    q, free = np.exp(log_q(low)), log_q(low) < log_q(high)
    if free.any():
        left = budget - costs[~free] @ q[~free]
        weights = np.exp(u[free] - u[free].max())
        q[free] = left * weights / (costs[free] @ weights)
    return np.clip(q, p_min, 1.0)


def check_vector(
    values: ArrayLike,
    name: str,
    size: int | None = None,
    least: float = -math.inf,
    most: float = math.inf,
) -> Vector:
    """`values` as 1-D float64 of `size` elements, finite and, but for rounding, in the range."""
    try:
        vector = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # the last from tensors with a graph
        raise SpecError(f"{name} must be a vector of numbers: {error}", name) from error
    if vector.ndim != 1 or not vector.size:
        raise SpecError(f"{name} must be 1-D and not empty, not of shape {vector.shape}", name)
    if size not in (None, len(vector)):
        raise SpecError(f"{name} must have {size} entries, not {len(vector)}", name)
    infinite = ~np.isfinite(vector)
    # The relative error of a probability that was computed is far smaller.
    outside = ~np.isclose(vector, vector.clip(least, most), rtol=1e-9, atol=0.0)
    for bad, wanted in ((infinite, "finite"), (outside, f"from {least:g} to {most:g}")):
        if bad.any():
            at = bad.argmax()
            raise SpecError(f"{name}[{at}] is {vector[at]}, and must be {wanted}", name)
    return vector


def _above_0(values: ArrayLike, name: str, size: int | None = None) -> Vector:
    vector = check_vector(values, name, size)
    if vector.min() <= 0:
        raise SpecError(f"{name} must be above 0, not {vector.min()}", name)
    return vector


def _check_budget(budget: float, p_min: float, costs: Vector) -> None:
    """Require a budget that some probabilities between p_min and 1 spend exactly."""
    check_positive("budget", budget)
    check_fraction("p_min", p_min)
    most = float(costs.sum())
    least, slack = p_min * most, 1e-12 * most
    if not least - slack <= budget <= most + slack:
        raise SpecError(
            f"the budget {budget:g} is infeasible: keeping all {len(costs)} layers costs {most:g}, "
            f"and p_min = {p_min:g} alone costs {least:g}",
            "budget",
        )
