"""The theory's choices for 2Direction: probabilities for a price of messages, and the step size.

Tyurin, Richtarik, NeurIPS 2023 (arXiv 2305.12379). :mod:`torchcomp.two_direction.theory` has the
symbols.
"""

import math
from dataclasses import dataclass

from torchcomp.specs.checks import check_share

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
