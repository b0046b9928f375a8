"""kl_project: the projection onto the capped simplex in the Kullback-Leibler divergence."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchcomp.checks import check_positive
from torchcomp.errors import SpecError

Vector = NDArray[np.float64]

_ROUNDING = 1e-9
"""Relative error of a probability that was computed, many times what it is."""


def kl_project(u: ArrayLike, budget: float, p_min: float, costs: ArrayLike | None = None) -> Vector:
    """The point of {sum c q = budget, p_min <= q <= 1} that is nearest to the weights exp(u).

    Nearest means least sum of c_d KL(q_d || exp(u_d)), which with equal costs c is the divergence
    of JointSpar's Algorithm 1. The minimiser is q = clip(exp(u + tau), p_min, 1) with one tau for
    all, and sum c q grows with tau. tau = -u_d is where q_d reaches 1, tau = log p_min - u_d where
    it leaves p_min: bisection over these 2 D break points finds the two between which tau lies,
    and between them the entries that are not clipped are in closed form. Only differences of u are
    ever raised to a power, so the result is right at |u| = 1e5.

    Source: Liu, Mozafari, "Communication-efficient distributed learning for large batch
    optimization", ICML 2022, Algorithm 1, last line. The costs are ours.

    Args:
        u: logarithms of the weights, finite, 1-D of D at least 1.
        budget: what sum c q must come to; with costs of 1, the expected number of layers S.
        p_min: lower bound of every entry, above 0 and at most 1.
        costs: c, finite and above 0, 1-D of D; ones if left out.

    Returns:
        q, float64, 1-D of D.

    Raises:
        SpecError: if an argument is out of its range, or no q has this sum.
    """
    logs, costs = check_vector(u, "u"), _costs(costs, u)
    check_budget(budget, p_min, costs)
    line = _Line(logs, costs, budget, math.log(p_min))
    return np.clip(line.between(*line.neighbours()), p_min, 1.0)


@dataclass(frozen=True)
class _Line:
    """q as a function of tau, by its break points.

    A break point is (d, bound): the tau at which entry d is exp(bound), bound 0 or log p_min.
    """

    u: Vector
    costs: Vector
    budget: float
    log_p_min: float

    def q(self, d: int, bound: float) -> Vector:
        """Log q at a break point."""
        q: Vector = np.clip((self.u - self.u[d]) + bound, self.log_p_min, 0.0)
        return q

    def neighbours(self) -> tuple[Vector, Vector]:
        """Log q at the last break point whose sum is within the budget, and at the next one."""
        tau = np.concatenate([self.log_p_min - self.u, -self.u])
        order = np.argsort(tau, kind="stable")
        size = len(self.u)

        def at(place: int) -> Vector:
            point = int(order[place])
            return self.q(point % size, 0.0 if point >= size else self.log_p_min)

        low, high = 0, 2 * size - 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.costs @ np.exp(at(middle)) <= self.budget:
                low = middle
            else:
                high = middle
        return at(low), at(high)

    def between(self, low: Vector, high: Vector) -> Vector:
        """Q whose sum is the budget, between two break points with none in between."""
        # What is at the same bound at both ends is at it in between; the rest moves with tau.
        free = low < high
        q = np.exp(low)
        if not free.any():
            return q
        rest = self.budget - self.costs[~free] @ q[~free]
        weights = np.exp(self.u[free] - self.u[free].max())
        q[free] = rest * weights / (self.costs[free] @ weights)
        return q


def check_budget(budget: float, p_min: float, costs: Vector) -> None:
    """Require a budget that some probabilities between p_min and 1 spend exactly.

    Raises:
        SpecError: saying which bound it passes.
    """
    check_positive("budget", budget)
    check_positive("p_min", p_min)
    if p_min > 1:
        raise SpecError(f"p_min is a probability, at most 1, not {p_min!r}", "p_min")
    most = float(costs.sum())
    slack = 1e-12 * most
    if budget > most + slack:
        raise SpecError(
            f"the budget {budget:g} is infeasible: keeping all {len(costs)} layers costs {most:g}",
            "budget",
        )
    if budget < p_min * most - slack:
        raise SpecError(
            f"the budget {budget:g} is infeasible: p_min = {p_min:g} alone costs "
            f"{p_min * most:g} ({len(costs)} layers that cost {most:g} together); raise the budget "
            "or lower p_min",
            "budget",
        )


def check_vector(
    values: ArrayLike,
    name: str,
    size: int | None = None,
    least: float = -math.inf,
    most: float = math.inf,
) -> Vector:
    """`values` as 1-D float64 of `size` elements (at least one), all from `least` to `most`.

    Raises:
        SpecError: if they are of another shape, or one is not finite or, by more than rounding,
            out of the range.
    """
    try:
        vector = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # the last from tensors with a graph
        raise SpecError(f"{name} must be a vector of numbers: {error}", name) from error
    if vector.ndim != 1 or not vector.size:
        raise SpecError(f"{name} must be 1-D and not empty, not of shape {vector.shape}", name)
    if size not in (None, len(vector)):
        raise SpecError(f"{name} must have {size} entries, not {len(vector)}", name)
    for bad, wanted in (
        (~np.isfinite(vector), "finite"),
        (
            ~np.isclose(vector, vector.clip(least, most), rtol=_ROUNDING, atol=0.0),
            f"from {least:g} to {most:g}",
        ),
    ):
        if bad.any():
            place = int(bad.argmax())
            raise SpecError(f"{name}[{place}] is {vector[place]}, and must be {wanted}", name)
    return vector


def _costs(costs: ArrayLike | None, u: ArrayLike) -> Vector:
    size = len(check_vector(u, "u"))
    if costs is None:
        return np.ones(size)
    vector = check_vector(costs, "costs")
    if len(vector) != size:
        raise SpecError(f"there are {len(vector)} costs for {size} entries of u", "costs")
    if vector.min() <= 0:
        raise SpecError(f"costs must be above 0, not {vector.min()}", "costs")
    return vector
