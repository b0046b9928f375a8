"""Two sweeps on the digits, with ten workers and mu = 1e-3.

* alpha: values of the server's message, from a hundredth to all of the coordinates.
* price: 2Direction's coin with the probability p for each price r of the downlink, compared with
  the default p = 1/(omega + 1). A worker pays (1 - r) up + r down for its coordinates.

With equal messages in both directions, the p for a price equals the default for every r. The sweep
therefore uses messages that are smaller downwards.
"""

import math
from dataclasses import replace

from recipes.two_direction.contest import Options, setting
from recipes.two_direction.data_sets import digits
from recipes.two_direction.methods import Messages
from recipes.two_direction.race import Race, Setting
from torchcomp.algorithms.two_direction.theory import Probabilities, priced_probabilities

MU, WORKERS = 1e-3, 10
DIGITS_D = 650
_QUICK_GAP = 1e-2
PRICES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
"""The values of r."""
PAIRS = ((65, 7), (325, 65))
"""Values of a worker's and of the server's message, for the sweep of r."""

TASK = "digits, 10 workers, mu = 0.001, f - f* to 1e-6, step sizes and budget of the contest"


def chance(sent: Messages, r: float) -> Probabilities | None:
    """Return 2Direction's probabilities for a price of the downlink, None if they are its default.

    Args:
        sent: the compressed messages.
        r: the price.
    """
    omega = DIGITS_D / sent.k_up - 1
    found = priced_probabilities(omega, d=DIGITS_D, k_up=sent.k_up, k_down=sent.k_down, r=r)
    # The default is p = tau = 1/(omega + 1).
    return None if math.isclose(found.p, 1 / (omega + 1)) else found


def alpha_races(*, quick: bool = False) -> list[Race]:
    """Return the races by size of the server's message."""
    k_downs = (65, 650) if quick else (7, 33, 65, 195, 650)
    base = _base(quick=quick)
    compressed: list[Race] = [
        (replace(base, sent=Messages(65, k)), ("2Direction", "EF21-P + DIANA")) for k in k_downs
    ]
    # AGD's messages are dense: one race is enough.
    return [(compressed[0][0], ("AGD", "AGD, three sequences")), *compressed]


def price_races(*, quick: bool = False) -> list[Race]:
    """Return the races by probability of the coin."""
    base, races = _base(quick=quick), []
    for pair in PAIRS[: 1 if quick else None]:
        # The rivals have no coin.
        rivals: tuple[str, ...] = ("EF21-P + DIANA", "AGD", "AGD, three sequences")
        races.append((replace(base, sent=Messages(*pair)), rivals))
        # Several prices can have the same probability.
        chances = dict.fromkeys(chance(Messages(*pair), r) for r in PRICES[:: 5 if quick else 1])
        races += [(replace(base, sent=Messages(*pair, own)), ("2Direction",)) for own in chances]
    return races


def _base(*, quick: bool) -> Setting:
    # One setting for all sizes of messages: f* is then found once.
    options = Options(gap=_QUICK_GAP) if quick else Options()
    return setting(digits(), WORKERS, MU, Messages(65, 65), options)
