"""The theory of 2Direction: constants, probabilities, step size and learning rates.

Tyurin, Richtarik, NeurIPS 2023 (arXiv 2305.12379). Arguments are symbols of the theory, see
:mod:`~torchcomp.algorithms.checks`; tau is the momentum of v and beta that of h.

The paper's Algorithm 2 carries Gamma, which grows geometrically: squared it leaves float64's range
near 1e154, after which the method silently stands still. Here its inverse rho = 1/Gamma is carried.
With c = Lbar rho + mu the paper's quadratic, divided by Gamma, reads

    p Lbar theta^2 + p c theta - c = 0,

and Gamma' = Gamma + gamma' = Gamma / (1 - p theta) becomes rho' = rho (1 - p theta). When rho has
shrunk to nothing, the learning rates have long been those of its limit.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from torchcomp.algorithms.checks import check_convexity, check_symbols, require
from torchcomp.checks import check_count, check_share
from torchcomp.compressors import Compressor
from torchcomp.errors import SpecError

CONSTANT = 660508.0
"""The theory's C of Lbar: an upper bound, and far too large to be of use. Tune the step instead."""


@dataclass(frozen=True)
class Probabilities:
    """The coin's probability and the momentum of v, both in (0, 1]."""

    p: float
    tau: float


def probabilities(omega: float) -> Probabilities:
    """P and tau where neither Lmax/L nor the price of the way down is known: 1/(omega + 1).

    SpecError if omega is negative or not finite.
    """
    check_symbols(omega=omega)
    p = 1 / (omega + 1)
    return Probabilities(p, p)


def priced_probabilities(
    omega: float, *, d: int, k_up: int, k_down: int, r: float
) -> Probabilities:
    """P and tau where the price of the way down is known; SpecError if a number is out of range.

    A message up has `k_up` coordinates, one down `k_down`. In the cost of communication the way
    down has the weight r, in [0, 1], and the way up 1 - r.
    """
    check_symbols(omega=omega, d=d)
    check_count("k_up", k_up, most=d)
    check_count("k_down", k_down, most=d)
    check_share("r", r)
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
    """Lbar, the inverse of the step size; `constant` is C. SpecError if one is out of its range."""
    check_symbols(smoothness=smoothness, lmax=lmax, constant=constant, alpha=alpha, p=p, tau=tau)
    check_symbols(omega=omega, n=n)
    beta = 1 / (omega + 1)
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
    """What the learning rates depend on; gamma0 is Gamma at the start."""

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
                "gamma0 must lie from 1e-100 to 1e100, because the learning rates square it; not "
                f"{self.gamma0!r}",
                "gamma0",
            )

    @cached_property
    def theta_min(self) -> float:
        """The bound on theta: 1/4 min(1, alpha/p, tau/p, beta/p)."""
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
    alpha: float | None = None,
    omega: float | None = None,
    gamma0: float = 1.0,
) -> Constants:
    """The constants of a run with d coordinates, an unbiased `up` and a contractive `down`.

    By default p and tau are 1/(omega + 1), and alpha and omega what the compressors declare; others
    are taken if they promise less. SpecError if one is out of range, or a compressor of the wrong
    kind.
    """
    known_omega = require("unbiased", up, d, "up")
    known_alpha = require("contractive", down, d, "down")
    omega = known_omega if omega is None else omega
    alpha = known_alpha if alpha is None else alpha
    check_symbols(omega=omega, alpha=alpha)
    for name, given, known, compressor, better in (
        ("omega", omega, known_omega, up, omega < known_omega),
        ("alpha", alpha, known_alpha, down, alpha > known_alpha),
    ):
        if better:
            raise SpecError(
                f"{name} = {given:g} contradicts '{compressor}', which guarantees {known:g} and no "
                f"better; leave {name} out to calculate with that",
                name,
            )
    beta = 1 / (omega + 1)
    p, tau = beta if p is None else p, beta if tau is None else tau
    return Constants(lbar, mu, p, tau, alpha, beta, gamma0)


@dataclass(frozen=True)
class LearningRates:
    """The learning rates of one iteration."""

    rho: float  # 1/Gamma of the next iteration
    theta: float
    constants: Constants

    def step(self, dual: Tensor, point: Tensor, y: Tensor) -> Tensor:
        """The mirror step from `point`, where `dual` estimates the gradient at `y`; all 1-D.

        It minimises <dual, x> + (Lbar + Gamma mu)/(2 gamma') |x - point|^2 + mu/2 |x - y|^2.
        """
        c = self.constants
        moved = c.p * self.theta
        pulled = (c.lbar * self.rho + (1 - moved) * c.mu) * point + c.mu * moved * y
        return (pulled - moved * dual) / (c.lbar * self.rho + c.mu)


def learning_rates(rho: float, constants: Constants) -> LearningRates:
    """The learning rates of the iteration that starts with Gamma = 1/rho (Algorithm 2)."""
    p, lbar = constants.p, constants.lbar
    c = lbar * rho + constants.mu
    theta_bar = 2 * c / (p * c + math.sqrt(p * p * c * c + 4 * p * lbar * c))
    theta = min(theta_bar, constants.theta_min)
    return LearningRates(rho * (1 - p * theta), theta, constants)
