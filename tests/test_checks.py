"""Checks of options: which values pass, which raise, and what the errors name."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from torchcomp.specs import checks
from torchcomp.specs.errors import SpecError

HUGE = 10**400  # beyond the range of floats
LONG = 10**5000  # cannot be printed

PASS = {
    checks.check_count: [1, 7, np.int64(3), HUGE],
    checks.check_positive: [1, 1e-300, np.float32(0.5), Fraction(1, 3), np.int64(2)],
    checks.check_at_least_0: [0, 0.0, -0.0, 1e300],
    checks.check_fraction: [1, 1.0, 1e-9, np.float32(0.25)],
    checks.check_share: [0, 1, 0.5],
    checks.check_momentum: [0, 0.9, np.nextafter(1.0, 0.0)],
    checks.check_flag: [True, False],
}
# No check accepts these: not a number, not finite, or negative.
NEVER = ["1", None, 1j, torch.tensor(1.0), np.array([0.5, 0.5]), float("nan"), float("inf")]
NEVER += [-float("inf"), np.float32("inf"), -1]
FAIL = {
    checks.check_count: [*NEVER, True, 0, 1.0, Fraction(2, 1)],
    checks.check_positive: [*NEVER, True, 0, 0.0, HUGE],
    checks.check_at_least_0: [*NEVER, True, -1e-300, HUGE],
    checks.check_fraction: [*NEVER, True, 0.0, 1.0000001],
    checks.check_share: [*NEVER, True, -1e-9, 1.0000001],
    checks.check_momentum: [*NEVER, False, 1.0, 1],
    checks.check_flag: [*NEVER, 0, 1, np.True_, LONG],
}


@pytest.mark.parametrize("check", PASS, ids=lambda check: check.__name__)
def test_valid_values_pass_and_others_raise(check):
    for value in PASS[check]:
        check("option", value)
    for value in FAIL[check]:
        with pytest.raises(SpecError, match="option") as caught:
            check("option", value)
        assert caught.value.field == "option"
        assert value is LONG or repr(value) in str(caught.value)


def test_errors_name_the_owner_the_option_the_bounds_and_the_value():
    with pytest.raises(SpecError, match=r"^topk: k .* 1, .* 0$"):
        checks.check_count("k", 0, owner="topk")
    with pytest.raises(SpecError, match=r"^n .* 2 .* 1,000, .* 1001$"):
        checks.check_count("n", 1001, 2, 1000)
    with pytest.raises(SpecError, match=r'^x .*"b", "a".* \[\]$'):
        checks.check_choice("x", [], ("b", "a"))
    checks.check_choice("x", "a", ("b", "a"))
