"""The theory of 2Direction: constants, probabilities, step size and learning rates.

Tyurin, Richtarik, NeurIPS 2023 (arXiv 2305.12379). For the symbols see
:mod:`~torchcomp.two_direction.checks`. tau is the momentum of v, and beta is the momentum of h.

The paper's Algorithm 2 computes with Gamma, which grows geometrically. Near 1e154 its square
exceeds the range of float64, and the method silently stops moving. This module computes with the
inverse rho = 1/Gamma instead. With c = Lbar rho + mu, the paper's quadratic divided by Gamma is

    p Lbar theta^2 + p c theta - c = 0,

and Gamma' = Gamma + gamma' = Gamma / (1 - p theta) becomes rho' = rho (1 - p theta). When rho
underflows to 0, the learning rates have reached their limit long before.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from torchcomp.compressors import Compressor
from torchcomp.specs.checks import check_count, check_share
from torchcomp.specs.errors import SpecError
from torchcomp.two_direction.checks import check_convexity, check_symbols, require

CONSTANT = 660508.0
"""The theory's constant C of Lbar: an upper bound, too large in practice. Tune the step size."""


@dataclass(frozen=True)
class Probabilities:
    """The probability p of the coin and the momentum tau of v, both in (0, 1]."""

    p: float
    tau: float


def priced_probabilities(
    omega: float, *, d: int, k_up: int, k_down: int, r: float
) -> Probabilities:
    """Return p and tau for a known cost of downlink messages.

    Args:
        omega: relative variance of the workers' compressor.
        d: number of coordinates.
        k_up: coordinates of an uplink message.
        k_down: coordinates of a downlink message.
        r: weight of downlink messages in the cost, in [0, 1]. Uplink messages have 1 - r.
    """
    check_symbols(omega=omega, d=d)
    check_count("k_up", k_up, most=d)
    check_count("k_down", k_down, most=d)
    check_share("r", r)
    # mu_r is the cost of a dense downlink message relative to the cost of an iteration's compressed
    # messages. The coin's p limits how often dense messages are sent.
    mu_r = r * d / ((1 - r) * k_up + r * k_down)
    p = min(1.0, 1 / (omega + 1), 1 / mu_r if mu_r else 1.0)
    return Probabilities(p, p ** (1 / 3) / (omega + 1) ** (2 / 3))


def lbar(
    smoothness: float,
    lmax: float,
    *,
    n: int,
    alpha: float,
    omega: float,
    p: float,
    tau: float,
    constant: float = CONSTANT,
) -> float:
    """Return Lbar, the inverse of the step size. `constant` is the factor C."""
    check_symbols(smoothness=smoothness, lmax=lmax, constant=constant, alpha=alpha, p=p, tau=tau)
    check_symbols(omega=omega, n=n)
    beta = 1 / (omega + 1)
    # The six terms of the paper's maximum, in its order.
    terms = (
        smoothness / alpha,
        smoothness * p / (alpha * tau),
        math.sqrt(smoothness * lmax) * p * math.sqrt(omega * tau) / (alpha * beta * math.sqrt(n)),
        math.sqrt(smoothness * lmax * p * omega * tau) / (alpha * math.sqrt(beta * n)),
        lmax * omega * p**2 / (beta**2 * n),
        lmax * omega / n,
    )
    return constant * max(terms)


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
        check_symbols(**{name: value for name, value in vars(self).items() if name != "mu"})
        check_convexity(self.mu, self.lbar, "lbar")
        if not 1e-100 <= float(self.gamma0) <= 1e100:
            raise SpecError(
                "gamma0 must be from 1e-100 to 1e100, because the learning rates square it; got "
                f"{self.gamma0!r}",
                "gamma0",
            )

    @cached_property
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
