"""The parameters of the theory: probabilities and Lbar."""

import math

import pytest

from torchcomp.algorithms import parameters
from torchcomp.errors import SpecError


def test_probabilities():
    assert vars(parameters.probabilities(9.0)) == {"p": 0.1, "tau": 0.1}
    # mu_r = 0.5 * 650 / 65 = 5 < omega + 1, so p = 1 / (omega + 1).
    even = parameters.priced_probabilities(9.0, d=650, k_up=65, k_down=65, r=0.5)
    assert (even.p, even.tau) == pytest.approx((0.1, 0.1 ** (1 / 3) / 10 ** (2 / 3)))
    # mu_r = 0.9 * 6500 / (0.1 * 650 + 0.9 * 65) = 47.4 > omega + 1, so p = 1 / mu_r.
    dear = parameters.priced_probabilities(9.0, d=6500, k_up=650, k_down=65, r=0.9)
    assert dear.p == pytest.approx((65 + 58.5) / 5850)
    free = parameters.priced_probabilities(0.0, d=650, k_up=650, k_down=65, r=0.0)
    assert (free.p, free.tau) == (1.0, 1.0)


@pytest.mark.parametrize("omega", [-3.0, -1.0, math.nan, math.inf])
def test_an_omega_or_d_out_of_range_is_refused(omega):
    with pytest.raises(SpecError, match=rf"omega\b.*{omega}"):
        parameters.probabilities(omega)
    with pytest.raises(SpecError, match=rf"omega\b.*{omega}"):
        parameters.priced_probabilities(omega, d=65, k_up=1, k_down=1, r=0.5)
    with pytest.raises(SpecError, match=r"^d\b.*\b1\b.*6\.5"):
        parameters.priced_probabilities(9.0, d=6.5, k_up=1, k_down=1, r=0.5)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        # In each case another term is the maximum: L/a; L p/(a tau); both square roots; both Lmax.
        ({"omega": 0.0, "alpha": 0.5, "p": 0.1, "tau": 1.0}, 2.0 / 0.5),
        ({"omega": 0.0, "alpha": 0.5, "p": 1.0, "tau": 0.1}, 2.0 / (0.5 * 0.1)),
        ({"omega": 3.0, "alpha": 0.1, "p": 1.0, "tau": 1.0}, math.sqrt(10 * 3) / (0.1 * 0.25 * 2)),
        (
            {"omega": 30.0, "alpha": 0.1, "p": 0.01, "tau": 1.0},
            math.sqrt(10 * 0.01 * 30) / (0.1 * math.sqrt(4 / 31)),
        ),
        ({"omega": 30.0, "alpha": 1.0, "p": 1.0, "tau": 0.1}, 5.0 * 30 * 31**2 / 4),
        ({"omega": 30.0, "alpha": 1.0, "p": 0.001, "tau": 0.001}, 5.0 * 30 / 4),
    ],
)
def test_lbar_is_the_largest_of_its_terms(case, expected):
    n, smoothness, lmax = 4, 2.0, 5.0
    ours = parameters.lbar(smoothness, lmax, n=n, constant=1.0, **case)
    assert ours == pytest.approx(expected)
    assert parameters.lbar(smoothness, lmax, n=n, **case) == pytest.approx(660508 * expected)
