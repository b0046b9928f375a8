"""Two sweeps on the digits, with ten workers and mu = 1e-3.

* alpha: values of the server's message, from a hundredth to all of the coordinates.
* price: 2Direction's coin with the probability p for each price r of the downlink, compared with
  the default p = 1/(omega + 1). A worker pays (1 - r) up + r down for its coordinates.

With equal messages in both directions, the p for a price equals the default for every r. The sweep
therefore uses messages that are smaller downwards.
"""

from recipes.two_direction.contest import setting
from recipes.two_direction.data_sets import digits
from recipes.two_direction.methods import Messages
from recipes.two_direction.race import Race
from torchcomp.algorithms.two_direction.theory import Probabilities, priced_probabilities

MU, WORKERS = 1e-3, 10
PRICES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
"""The values of r."""
PAIRS = ((65, 7), (325, 65))
"""Values of a worker's and of the server's message, for the sweep of r."""

TASK = "digits, 10 workers, mu = 0.001, f - f* to 1e-6, step sizes and budget of the contest"


def priced(sent: Messages, d: int, r: float) -> Probabilities:
    """Return 2Direction's probabilities for a price of the downlink."""
    omega = d / sent.k_up - 1
    return priced_probabilities(omega, d=d, k_up=sent.k_up, k_down=sent.k_down, r=r)


def alpha_races(*, quick: bool = False) -> list[Race]:
    """Return the races by size of the server's message."""
    samples = digits()
    k_downs = (65, 650) if quick else (7, 33, 65, 195, 650)
    compressed: list[Race] = [
        (setting(samples, WORKERS, MU, Messages(65, k)), ("2Direction", "EF21-P + DIANA"))
        for k in k_downs
    ]
    # AGD's messages are dense: one race is enough.
    return [(compressed[0][0], ("AGD", "AGD, three sequences")), *compressed]


def price_races(*, quick: bool = False) -> list[Race]:
    """Return the races by probability of the coin."""
    samples = digits()
    races: list[Race] = []
    for sent in [Messages(*pair) for pair in PAIRS[: 1 if quick else None]]:
        others = ("EF21-P + DIANA", "AGD", "AGD, three sequences", "2Direction")
        races.append((setting(samples, WORKERS, MU, sent), others))
        chances = {priced(sent, samples.d, r) for r in PRICES[:: 5 if quick else 1]}
        # The default, up to rounding, is in the race above.
        default = 1 / (samples.d / sent.k_up)
        for chance in sorted(chances, key=lambda chance: chance.p):
            if chance.p < 0.999 * default:
                own = Messages(sent.k_up, sent.k_down, chance)
                races.append((setting(samples, WORKERS, MU, own), ("2Direction",)))
    return races
