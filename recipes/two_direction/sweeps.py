"""The downlink on the digits, with ten workers and mu = 1e-3: its size and its price.

* Size: values of the server's message, from a hundredth to all of the coordinates.
* Price: 2Direction's coin with the probability p for each price r of the downlink, compared with
  the default p = 1/(omega + 1). A worker pays (1 - r) up + r down for its coordinates.

With equal messages in both directions, the p for a price equals the default for every r. The sweep
of prices therefore uses messages that are smaller downwards.
"""

import math
from dataclasses import replace

from recipes.two_direction.contest import BUDGET, GAP, Options, setting
from recipes.two_direction.data_sets import digits
from recipes.two_direction.methods import Messages
from recipes.two_direction.race import Race, Setting
from torchcomp.two_direction.theory import Probabilities, priced_probabilities

MU, WORKERS = 1e-3, 10
DIGITS_D = 650
_QUICK_GAP = 1e-1
PRICES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
"""The values of r."""
K_UP = 65
"""Values of a worker's message."""
K_DOWNS = (7, 33, 65, 195, 650)
"""Values of the server's message."""
PRICED_K_DOWNS = (33, 7)
"""The same, for the sweep of r."""
POWERS = range(-4, 10)
"""The i of the step sizes 2^i to try, up to the largest that accelerated methods allow, 1/mu."""


def task(*, quick: bool = False) -> str:
    """Return what all races share, for the head of their table."""
    steps = f"step sizes 2^{POWERS[0]} to 2^{POWERS[-1]}"
    where = f"digits, {WORKERS} workers, mu = {MU:g}, f - f* to {_gap(quick=quick):g}"
    return f"{where}, at most {BUDGET:,} coordinates, {steps}"


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


def downlink_races(*, quick: bool = False) -> list[Race]:
    """Return the races by size of the server's message, and by probability of the coin."""
    base = _base(quick=quick)
    races: list[Race] = [
        # AGD's messages are dense: one race is enough.
        (replace(base, sent=Messages(K_UP, K_DOWNS[0])), ("AGD", "AGD, three sequences")),
        *(
            (replace(base, sent=Messages(K_UP, k)), ("EF21-P + DIANA", "2Direction"))
            for k in (K_DOWNS[1:3] if quick else K_DOWNS)
        ),
    ]
    for k in K_DOWNS[1:2] if quick else PRICED_K_DOWNS:
        chances = (chance(Messages(K_UP, k), r) for r in PRICES)
        # Several prices can have the same probability.
        for own in dict.fromkeys(each for each in chances if each):
            races.append((replace(base, sent=Messages(K_UP, k, own)), ("2Direction",)))
    return races


def _base(*, quick: bool) -> Setting:
    # One setting for all sizes of messages: f* is then found once.
    options = Options(gap=_gap(quick=quick), powers=POWERS)
    return setting(digits(), WORKERS, MU, Messages(K_UP, K_UP), options)


def _gap(*, quick: bool) -> float:
    return _QUICK_GAP if quick else GAP
