"""Where 2Direction wins: quadratics by condition number, omega, number of workers and price.

Messages have K values in both directions, so omega = d/K - 1 and alpha = K/d. A run of a method
gives its cost at every price r of the downlink, (1 - r) up + r down. Step sizes are tuned for
r = 1/2: an iteration costs the same with each of them, so the same one is best at every r.
"""

import math

from recipes.two_direction.methods import Messages, Problem
from recipes.two_direction.quadratics import Quadratics
from recipes.two_direction.race import Race, Setting

D = 60
FALL = 1e-4
"""A run ends when f - f* has fallen to this share of its value at the start."""
TASK = f"quadratics of {D} dimensions, f - f* to {FALL:g} of its start"
PRICES = (0.0, 0.5, 1.0)
"""The values of r."""
_KAPPAS = (10.0, 100.0, 1e3, 1e4)
_KS = (30, 6, 3)
_WORKERS = (4, 64)
_POWERS = range(-6, 7)
METHODS = ("AGD, three sequences", "AGD", "2Direction", "EF21-P + DIANA")


def quadratic_setting(
    kappa: float, n: int, sent: Messages, budget: int, powers: range = _POWERS
) -> Setting:
    """Return quadratics of :data:`D` dimensions whose vectors b_i are drawn from the seed."""

    def case(seed: int) -> tuple[Problem, float]:
        return Quadratics(kappa, n, seed, D), 0.0

    return Setting("quadratics", case, n, 1 / kappa, sent, FALL, budget, powers)


def winner_races(*, quick: bool = False) -> list[Race]:
    """Return the races of the map."""
    kappas, ks = (_KAPPAS[:2], _KS[:2]) if quick else (_KAPPAS, _KS)
    return [
        (quadratic_setting(kappa, n, Messages(k, k), _budget(kappa)), _methods(kappa))
        for n in (_WORKERS[:1] if quick else _WORKERS)
        for kappa in kappas
        for k in ks
    ]


def _methods(kappa: float) -> tuple[str, ...]:
    # The iterations of EF21-P + DIANA grow with kappa, those of AGD with its root. Everywhere, it
    # has lost at the second largest kappa.
    return METHODS if kappa < max(_KAPPAS) else METHODS[:-1]


def _budget(kappa: float) -> int:
    # Up to 1.6 times what AGD with three sequences needs, and 1.9 to 2.3 times what AGD needs.
    # 2Direction's uplink is two fifths of its total and AGD's a half, so a run beyond the budget
    # has lost at every price.
    return round(1200 * math.sqrt(kappa))
