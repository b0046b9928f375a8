"""Tests of the checks of options: what passes, what does not, and what is said."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from torchcomp import checks
from torchcomp.errors import SpecError

HUGE = 10**400  # beyond the range of floats

PASS = {
    checks.check_count: [1, 7, np.int64(3), HUGE],
    checks.check_positive: [1, 1e-300, np.float32(0.5), Fraction(1, 3), np.int64(2)],
    checks.check_at_least_0: [0, 0.0, -0.0, 1e300],
    checks.check_fraction: [1, 1.0, 1e-9, np.float32(0.25)],
    checks.check_share: [0, 1, 0.5],
    checks.check_momentum: [0, 0.9, np.nextafter(1.0, 0.0)],
    checks.check_flag: [True, False],
}
# None of these is a number, or none is finite.
NEVER = ["1", None, 1j, torch.tensor(1.0), np.array([0.5, 0.5]), float("nan"), float("inf")]
NEVER += [-float("inf"), np.float32("inf"), -1]
FAIL = {
    checks.check_count: [*NEVER, True, 0, 1.0, Fraction(2, 1)],
    checks.check_positive: [*NEVER, True, 0, 0.0, HUGE],
    checks.check_at_least_0: [*NEVER, True, -1e-300, HUGE],
    checks.check_fraction: [*NEVER, True, 0.0, 1.0000001],
    checks.check_share: [*NEVER, True, -1e-9, 1.0000001],
    checks.check_momentum: [*NEVER, False, 1.0, 1],
    checks.check_flag: [*NEVER, 0, 1, np.True_],
}


@pytest.mark.parametrize("check", PASS, ids=lambda check: check.__name__)
def test_what_passes_and_what_does_not(check):
    for value in PASS[check]:
        check("option", value)
    for value in FAIL[check]:
        with pytest.raises(SpecError, match=r"^option must be .*, not ") as caught:
            check("option", value)
        assert caught.value.field == "option"


def test_what_is_said():
    with pytest.raises(SpecError, match=r"^topk: k must be a whole number of at least 1, not 0$"):
        checks.check_count("k", 0, owner="topk")
    with pytest.raises(SpecError, match=r"^n must be a whole number from 2 to 1,000, not 1001$"):
        checks.check_count("n", 1001, 2, 1000)
    with pytest.raises(SpecError, match=r'^x must be one of "b", "a", not \[\]$'):
        checks.check_choice("x", [], ("b", "a"))
    checks.check_choice("x", "a", ("b", "a"))
