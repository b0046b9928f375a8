"""The theory of 2Direction: its symbols, constants and learning rates.

Tyurin, Richtarik, NeurIPS 2023 (arXiv 2305.12379). lbar: inverse of the step size; mu: strong
convexity; omega: variance of the workers' compressor; alpha: contraction of the server's; p:
probability of the coin; tau, beta: momenta of v and h.

The paper's Algorithm 2 computes with Gamma, which grows geometrically. Near 1e154 its square
exceeds the range of float64, and the method silently stops moving. This module computes with the
inverse rho = 1/Gamma instead. With c = Lbar rho + mu, the paper's quadratic divided by Gamma is

    p Lbar theta^2 + p c theta - c = 0,

and Gamma' = Gamma + gamma' = Gamma / (1 - p theta) becomes rho' = rho (1 - p theta). When rho
underflows to 0, the learning rates have reached their limit long before.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from torchcomp.compressors import Compressor
from torchcomp.compressors.sparse import Sparsifier
from torchcomp.specs.checks import check_fraction, check_positive, is_number
from torchcomp.specs.errors import SpecError


def require(kind: str, compressor: Compressor, d: int, role: str) -> float:
    """Return omega or alpha of an "unbiased" or "contractive" compressor for `d` elements."""
    if not isinstance(compressor, Compressor):
        raise SpecError(f"{role} must be a compressor such as TopK(k=65), not {compressor!r}", role)
    constant = {"unbiased": "omega", "contractive": "alpha"}[kind]
    declared: float | None = getattr(compressor, constant)(d)
    too_many = isinstance(compressor, Sparsifier) and (compressor.k or 0) > d
    if too_many or compressor.scope == "tensor" or len(compressor.stages) > 1:
        problem = f'must suit one vector of {d} values, without warmup(...) and scope="tensor"'
        raise SpecError(f"{role}: '{compressor}' {problem}", role)
    if declared is None:
        raise SpecError(f"{role}: '{compressor}' is not {kind} (it declares no {constant})", role)
    return declared


@dataclass(frozen=True)
class Constants:
    """The constants that the learning rates depend on. gamma0 is the initial Gamma."""

    lbar: float
    mu: float
    p: float
    tau: float
    alpha: float
    beta: float
    gamma0: float = 1.0

    def __post_init__(self) -> None:
        for name in ("p", "tau", "alpha", "beta"):
            check_fraction(name, getattr(self, name))
        for name in ("lbar", "gamma0"):
            check_positive(name, getattr(self, name))
        if not is_number(self.mu) or not 0 <= self.mu <= self.lbar:
            raise SpecError(f"mu must be from 0 to lbar = {self.lbar:g}, not {self.mu!r}", "mu")
        if not 1e-100 <= float(self.gamma0) <= 1e100:
            problem = f"gamma0 must be from 1e-100 to 1e100, not {self.gamma0!r}"
            raise SpecError(problem, "gamma0")

    @property
    def theta_min(self) -> float:
        """The upper bound on theta: 1/4 min(1, alpha/p, tau/p, beta/p)."""
        return min(1.0, self.alpha / self.p, self.tau / self.p, self.beta / self.p) / 4


def constants(
    d: int,
    up: Compressor,
    down: Compressor,
    *,
    lbar: float,
    mu: float,
    p: float | None = None,
    tau: float | None = None,
    gamma0: float = 1.0,
) -> Constants:
    """Return the constants of a run with d coordinates, an unbiased `up` and a contractive `down`.

    p and tau are 1/(omega + 1) by default. The compressors declare omega and alpha.
    """
    beta = 1 / (require("unbiased", up, d, "up") + 1)
    alpha = require("contractive", down, d, "down")
    p, tau = beta if p is None else p, beta if tau is None else tau
    return Constants(lbar, mu, p, tau, alpha, beta, gamma0)


@dataclass(frozen=True)
class LearningRates:
    """The learning rates of one iteration."""

    rho: float  # 1/Gamma of the next iteration
    theta: float
    constants: Constants

    def step(self, dual: Tensor, point: Tensor, y: Tensor) -> Tensor:
        """Return the mirror step from `point`. `dual` estimates the gradient at `y`. All are 1-D.

        The step minimizes <dual, x> + (Lbar + Gamma mu)/(2 gamma') |x - point|^2 + mu/2 |x - y|^2.
        """
        # The paper's formula divided by Gamma', with gamma'/Gamma' = p theta.
        c = self.constants
        moved = c.p * self.theta
        pulled = (c.lbar * self.rho + (1 - moved) * c.mu) * point + c.mu * moved * y
        return (pulled - moved * dual) / (c.lbar * self.rho + c.mu)


def learning_rates(rho: float, constants: Constants) -> LearningRates:
    """Return the learning rates of the iteration that starts with Gamma = 1/rho (Algorithm 2)."""
    p, lbar = constants.p, constants.lbar
    c = lbar * rho + constants.mu
    # The positive root of the quadratic, in the form without cancellation: -b + sqrt(b^2 + ...)
    # would subtract two nearly equal numbers where p c dominates.
    theta_bar = 2 * c / (p * c + math.sqrt(p * p * c * c + 4 * p * lbar * c))
    theta = min(theta_bar, constants.theta_min)
    return LearningRates(rho * (1 - p * theta), theta, constants)
