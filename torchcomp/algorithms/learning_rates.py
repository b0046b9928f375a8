"""The learning rates of 2Direction, in a form that does not overflow.

The paper (Algorithm 2) carries Gamma, which grows geometrically: squared it leaves float64's range
near 1e154, after which the method silently stands still. Here its inverse rho = 1/Gamma is carried.
With c = Lbar rho + mu the paper's quadratic, divided by Gamma, reads

    p Lbar theta^2 + p c theta - c = 0,

and Gamma' = Gamma + gamma' = Gamma / (1 - p theta) becomes rho' = rho (1 - p theta). When rho has
shrunk to nothing, the rates have long been those of its limit.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from torchcomp.algorithms.checks import check_convexity
from torchcomp.checks import check_fraction, check_positive


@dataclass(frozen=True)
class Constants:
    """What the learning rates depend on besides rho.

    Attributes:
        lbar: Lbar, the inverse of the step size, above 0.
        mu: strong convexity of f, at least 0.
        p: probability of the coin, in (0, 1].
        tau: momentum of v, in (0, 1].
        alpha: contraction constant of the downlink's compressor, in (0, 1].
        beta: momentum of h, in (0, 1].

    Raises:
        SpecError: if one of them is out of its range.
    """

    lbar: float
    mu: float
    p: float
    tau: float
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        check_positive("lbar", self.lbar)
        check_convexity(self.mu, self.lbar, "lbar")
        for name in ("p", "tau", "alpha", "beta"):
            check_fraction(name, getattr(self, name))

    @cached_property
    def theta_min(self) -> float:
        """The bound on theta: 1/4 min(1, alpha/p, tau/p, beta/p)."""
        return min(1.0, self.alpha / self.p, self.tau / self.p, self.beta / self.p) / 4


@dataclass(frozen=True)
class Rates:
    """The rates of one iteration.

    Attributes:
        rho: 1/Gamma of the next iteration.
        theta: the iteration's theta.
        constants: what they were computed from.
    """

    rho: float
    theta: float
    constants: Constants

    def step(self, dual: Tensor, point: Tensor, y: Tensor) -> Tensor:
        """The mirror step: argmin_x of the linear model of f along `dual` with two proximal terms.

        The function minimised is <dual, x> + (Lbar + Gamma mu)/(2 gamma') |x - point|^2
        + mu/2 |x - y|^2.

        Args:
            dual: a gradient or an estimate of one; 1-D, like `point` and `y`.
            point: where the step starts.
            y: where the gradient was taken.
        """
        c = self.constants
        moved = c.p * self.theta
        pulled = (c.lbar * self.rho + (1 - moved) * c.mu) * point + c.mu * moved * y
        return (pulled - moved * dual) / (c.lbar * self.rho + c.mu)


def learning_rates(rho: float, constants: Constants) -> Rates:
    """The rates of the iteration that starts with Gamma = 1/rho (Algorithm 2)."""
    p, lbar = constants.p, constants.lbar
    c = lbar * rho + constants.mu
    theta_bar = 2 * c / (p * c + math.sqrt(p * p * c * c + 4 * p * lbar * c))
    theta = min(theta_bar, constants.theta_min)
    return Rates(rho * (1 - p * theta), theta, constants)
