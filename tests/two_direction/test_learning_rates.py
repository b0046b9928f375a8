"""The stable recursion of the learning rates against the paper's, which overflows."""

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

from torchcomp.two_direction.theory import Constants, learning_rates

CONSTANTS = Constants(lbar=20.0, mu=0.5, p=0.25, tau=0.5, alpha=0.25, beta=0.5)
CASES = [
    CONSTANTS,
    Constants(lbar=1e4, mu=1e-4, p=0.1, tau=0.1, alpha=0.1, beta=0.1),
    Constants(lbar=7.0, mu=0.0, p=0.3, tau=1.0, alpha=0.9, beta=0.2),
    Constants(lbar=1.0, mu=1.0, p=1.0, tau=1.0, alpha=1.0, beta=1.0),
]


def printed(gamma, c):
    """Algorithm 2 as printed in the paper. Returns Gamma', gamma' and theta'."""
    square, linear = c.p * c.lbar * gamma, c.p * (c.lbar + gamma * c.mu)
    constant = -(c.lbar + gamma * c.mu)
    root = math.sqrt(linear * linear - 4 * square * constant)
    theta_bar = (-linear + root) / (2 * square)
    theta_min = min(1, c.alpha / c.p, c.tau / c.p, c.beta / c.p) / 4
    theta = min(theta_bar, theta_min)
    step = c.p * theta * gamma / (1 - c.p * theta)
    return gamma + step, step, theta


def printed_step(gamma, new, c, dual, point, y):
    total, step, _ = new
    pulled = (c.lbar + gamma * c.mu) * point + c.mu * step * y - step * dual
    return pulled / (c.lbar + total * c.mu)


@pytest.mark.parametrize("c", CASES)
def test_both_forms_are_equal_before_the_printed_one_overflows(c):
    dual, point, y = torch.randn(3, 5, dtype=torch.float64, generator=torch.manual_seed(0))
    gamma, rho = 1.0, 1.0
    for _ in range(300):
        new, rates = printed(gamma, c), learning_rates(rho, c)
        assert rates.theta == pytest.approx(new[2], rel=1e-9)
        assert 1 / rates.rho == pytest.approx(new[0], rel=1e-9)
        torch.testing.assert_close(
            rates.step(dual, point, y), printed_step(gamma, new, c, dual, point, y)
        )
        gamma, rho = new[0], rates.rho


def iterations_of_the_printed_form(gamma, c):
    for t in range(200_000):
        with np.errstate(over="ignore", invalid="ignore"):
            gamma, step, theta = printed_in(gamma, c)
        if not (np.isfinite(gamma) and np.isfinite(step) and theta > 0):
            return t
    return None


def printed_in(gamma, c):
    """The printed form in the precision of `gamma`, a NumPy scalar."""
    number = type(gamma)
    lbar, mu, p = number(c.lbar), number(c.mu), number(c.p)
    square, linear = p * lbar * gamma, p * (lbar + gamma * mu)
    root = np.sqrt(linear * linear + number(4) * square * (lbar + gamma * mu))
    theta = min((root - linear) / (number(2) * square), number(c.theta_min))
    step = p * theta * gamma / (number(1) - p * theta)
    return gamma + step, step, theta


@pytest.mark.parametrize(("number", "rounding"), [(np.float64, 1e-12), (np.float32, 1e-3)])
def test_the_stable_form_works_after_the_printed_one_has_overflowed(number, rounding):
    assert iterations_of_the_printed_form(number(1), CONSTANTS) < 200_000
    c = Constants(**{name: number(value) for name, value in asdict(CONSTANTS).items()})
    rho = number(1)
    for _ in range(200_000):
        rates = learning_rates(rho, c)
        rho = rates.rho
    # With rho = 0, c = mu and theta is the root of p Lbar theta^2 + p mu theta = mu.
    limit = 2 * 0.5 / (0.25 * 0.5 + math.sqrt(0.25**2 * 0.5**2 + 4 * 0.25 * 20 * 0.5))
    assert rates.theta == pytest.approx(min(limit, CONSTANTS.theta_min), rel=rounding)
    assert 0 <= rho < np.finfo(number).tiny


def test_without_strong_convexity_gamma_grows_like_the_square_of_the_iterations():
    c = Constants(lbar=7.0, mu=0.0, p=0.3, tau=1.0, alpha=0.9, beta=0.3)
    rho, gammas = 1.0, {}
    for t in range(1, 200_001):
        rho = learning_rates(rho, c).rho
        gammas[t] = 1 / rho
    assert gammas[200_000] / gammas[100_000] == pytest.approx(4, rel=0.01)


def test_the_mirror_step_is_the_minimum_of_its_objective():
    c, rho = CONSTANTS, 0.3
    rates = learning_rates(rho, c)
    dual, point, y = torch.randn(3, 5, dtype=torch.float64, generator=torch.manual_seed(0))
    gamma, step = 1 / rho, 1 / rates.rho - 1 / rho
    x = rates.step(dual, point, y).requires_grad_()
    near = (c.lbar + gamma * c.mu) / (2 * step) * (x - point).square().sum()
    (dual @ x + near + c.mu / 2 * (x - y).square().sum()).backward()
    assert x.grad.abs().max() < 1e-10
