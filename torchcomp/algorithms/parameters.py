"""The theory's parameters of 2Direction.

Tyurin, Richtarik, NeurIPS 2023 (arXiv 2305.12379), in its symbols: `smoothness` is L of f, `lmax`
the largest smoothness of an f_i, and omega and alpha belong to the compressors up and down.
"""

import math
from dataclasses import dataclass

from torchcomp.algorithms.checks import require_contractive, require_unbiased
from torchcomp.algorithms.learning_rates import Constants
from torchcomp.checks import (
    check_at_least_0,
    check_count,
    check_fraction,
    check_positive,
    check_share,
)
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

    Args:
        omega: relative variance of the compressor up.

    Raises:
        SpecError: if omega is negative or not finite.
    """
    check_at_least_0("omega", omega)
    return Probabilities(1 / (omega + 1), 1 / (omega + 1))


def priced_probabilities(
    omega: float, *, d: int, k_up: int, k_down: int, r: float
) -> Probabilities:
    """P and tau where the price of the way down is known.

    Args:
        omega: relative variance of the compressor up.
        d: number of coordinates.
        k_up: coordinates of a message up.
        k_down: coordinates of a message down.
        r: weight of the way down in the cost of communication, in [0, 1]; the way up has 1 - r.

    Raises:
        SpecError: if a number is out of its range.
    """
    check_at_least_0("omega", omega)
    check_count("d", d)
    for name, count in (("k_up", k_up), ("k_down", k_down)):
        check_count(name, count, most=d)
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
    """Lbar, the inverse of the step size.

    Args:
        smoothness: L.
        lmax: Lmax.
        n: number of workers.
        alpha: contraction constant of the compressor down.
        omega: relative variance of the compressor up.
        p: probability of the coin.
        tau: momentum of v.
        constant: C; the theory's is :data:`CONSTANT`.

    Raises:
        SpecError: if a parameter is out of its range.
    """
    for name, value in (("smoothness", smoothness), ("lmax", lmax), ("constant", constant)):
        check_positive(name, value)
    for name, value in (("alpha", alpha), ("p", p), ("tau", tau)):
        check_fraction(name, value)
    check_at_least_0("omega", omega)
    check_count("n", n)
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
) -> Constants:
    """The constants of a run with d coordinates.

    Args:
        d: number of coordinates.
        up: unbiased compressor of the workers.
        down: contractive compressor of the server.
        lbar: inverse of the step size; see :func:`lbar`.
        mu: strong convexity of f, at least 0.
        p: probability of the coin; by default 1/(omega + 1).
        tau: momentum of v; by default 1/(omega + 1).
        alpha: contraction constant to calculate with; by default what `down` declares.
        omega: relative variance to calculate with; by default what `up` declares.

    Raises:
        SpecError: if a parameter is out of its range, or a compressor of the wrong kind.
    """
    known_omega = require_unbiased(up, d, "up")
    known_alpha = require_contractive(down, d, "down")
    omega = known_omega if omega is None else omega
    alpha = known_alpha if alpha is None else alpha
    check_at_least_0("omega", omega)
    check_fraction("alpha", alpha)
    if omega < known_omega:
        raise _contradiction("omega", omega, known_omega, up)
    if alpha > known_alpha:
        raise _contradiction("alpha", alpha, known_alpha, down)
    beta = 1 / (omega + 1)
    return Constants(lbar, mu, beta if p is None else p, beta if tau is None else tau, alpha, beta)


def _contradiction(name: str, given: float, declared: float, compressor: Compressor) -> SpecError:
    return SpecError(
        f"{name} = {given:g} contradicts '{compressor}', which guarantees {declared:g} and no "
        f"better; leave {name} out to calculate with that",
        name,
    )
