"""2Direction and its reference against a trace from another program, and against each other.

A convergence test is not enough: with an error in the lines of q and k the method still converges.
"""

import itertools
import math
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from torchcomp import reference
from torchcomp.compressors import Compressor, TopK
from torchcomp.compressors.base import Encoded
from torchcomp.routes.wire import Field
from torchcomp.two_direction import Simulated, TwoDirectionMethod
from torchcomp.two_direction.theory import Constants, learning_rates

D = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]], dtype=torch.float64)
B = torch.tensor([[1, 1, 1, 1], [1, -2, 3, -4]], dtype=torch.float64)

AFTER_3 = """
x  +0.003839729040 -0.001919232273 +0.007681134917 -0.005760642110
z  +0.001672134046 -0.000837470114 +0.003345671183 -0.002507148750
u  +0.010342514021 -0.005164518751 +0.020687526121 -0.015521122190
w  +0.010373732096 -0.005186867985 +0.020687526121 -0.015539579373
k  -1.0 +0.5 -2.0 +1.5
v  -0.995819664886 +0.497906324715 -1.991635822043 +1.493732128125
h_1 -0.998327865954 -1.001674940228 -0.989962986452 -1.010028595001
"""
AFTER_8 = """
x  +0.012375080502 -0.006198820039 +0.024773159281 -0.018557521520
z  +0.012375080502 -0.006198820039 +0.024773159281 -0.018557521520
u  +0.031998827778 -0.016053382033 +0.064091418512 -0.047969472237
w  +0.031998827778 -0.016234715657 +0.064357180912 -0.048323374012
"""


@dataclass(frozen=True)
class Turning(Compressor):
    """Message j of worker i keeps the coordinates (i + j) mod 4 and (i + j + 1) mod 4, doubled."""

    name: ClassVar[str] = "turning"

    def layout(self, numel, dtype):
        return (Field("values", dtype, 2),)

    def kept(self, numel):
        return 2

    def encode(self, x, vectors, key):
        return Encoded([(2 * x[self._support(key)],)])

    def accumulate(self, messages, out, vectors, key, weight=1.0):
        for ((values,),) in messages:
            out[self._support(key)] += weight * values

    def alpha(self, numel):
        return None

    def omega(self, numel):
        return 1.0

    @staticmethod
    def _support(key):
        first = key.rank + key.step
        return [first % 4, (first + 1) % 4]


def method(**changes):
    options = {"lbar": 20.0, "mu": 0.5, "p": 0.25, "tau": 0.5, "gamma0": 1.0}
    options |= {"coin": heads, "up": Turning(), "down": TopK(k=1)}
    x0 = torch.zeros(4, dtype=torch.float64)
    return TwoDirectionMethod(lambda x: D * x - B, x0, Simulated(2), **{**options, **changes})


def heads(t):
    return t % 3 == 1


def turning(vector, call, worker):
    support = [(worker + call) % 4, (worker + call + 1) % 4]
    sent = torch.zeros_like(vector)
    sent[support] = 2 * vector[support]
    return sent


def printed(theory, gamma=1.0):
    x0 = torch.zeros(4, dtype=torch.float64)
    calls = (lambda i, x: D[i] * x - B[i]), x0, 2, turning, (lambda x, t: reference.top(x, 1))
    for vectors in reference.two_direction(*calls, heads, theory, gamma):
        yield {**vectors, "h_1": vectors["h_i"][0]}


TRACES = [(3, AFTER_3, 1.2136296296, 16, 15), (8, AFTER_8, 1.6758293366, 36, 36)]


@pytest.mark.parametrize(("iterations", "trace", "gamma", "up", "down"), TRACES)
def test_trace(iterations, trace, gamma, up, down):
    run = method()
    for _ in range(iterations):
        run.step()
    run.finish_iteration()
    sent = run.server.traffic
    assert (sent.up_coordinates, sent.down_coordinates) == (up, down)
    theory = reference.Theory(lbar=20.0, mu=0.5, p=0.25, tau=0.5, alpha=0.25, beta=0.5)
    *_, twin = itertools.islice(printed(theory), iterations)
    for held in ({**vars(run), "h_1": run.h_i[0], "gamma": run.gamma}, twin):
        assert held["gamma"] == pytest.approx(gamma, abs=1e-10)
        for line in trace.split("\n")[1:-1]:
            name, *numbers = line.split()
            expected = torch.tensor([float(number) for number in numbers], dtype=torch.float64)
            torch.testing.assert_close(held[name], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("mu", "tau", "gamma"), [(0.5, 0.3, 1.0), (0.0, 0.7, 5.0)])
def test_equals_the_reference_in_every_vector(mu, tau, gamma):
    """Here v is not h: tau differs from beta."""
    run = method(mu=mu, tau=tau, gamma0=gamma)
    theory = reference.Theory(lbar=20.0, mu=mu, p=0.25, tau=tau, alpha=0.25, beta=0.5)
    for twin in itertools.islice(printed(theory, gamma), 60):
        run.step()
        run.finish_iteration()
        for name in ("x", "u", "v", "h", "w", "z", "k", "h_i"):
            torch.testing.assert_close(vars(run)[name], twin[name], rtol=1e-10, atol=1e-12)
        assert run.gamma == pytest.approx(twin["gamma"], rel=1e-10)


# --- Learning rates -------------------------------------------------------------------------------

CASES = [
    Constants(lbar=20.0, mu=0.5, p=0.25, tau=0.5, alpha=0.25, beta=0.5),
    Constants(lbar=1e4, mu=1e-4, p=0.1, tau=0.1, alpha=0.1, beta=0.1),
    Constants(lbar=7.0, mu=0.0, p=0.3, tau=1.0, alpha=0.9, beta=0.2),
    Constants(lbar=1.0, mu=1.0, p=1.0, tau=1.0, alpha=1.0, beta=1.0),
]


@pytest.mark.parametrize("c", CASES)
def test_the_stable_recursion_equals_the_printed_one(c):
    theory = reference.Theory(c.lbar, c.mu, c.p, c.tau, c.alpha, c.beta)
    gamma, rho = 1.0, 1.0
    for _ in range(300):
        gamma, _, theta = reference.learning_rates(gamma, theory)
        rates = learning_rates(rho, c)
        rho = rates.rho
        assert (rates.theta, 1 / rho) == pytest.approx((theta, gamma), rel=1e-9)


@pytest.mark.parametrize(("number", "rounding"), [(np.float64, 1e-12), (np.float32, 1e-3)])
def test_the_stable_recursion_works_after_the_printed_one_has_overflowed(number, rounding):
    c = Constants(**{name: number(value) for name, value in asdict(CASES[0]).items()})
    rho = number(1)
    for _ in range(200_000):
        rates = learning_rates(rho, c)
        rho = rates.rho
    # With rho = 0, theta is the root of p Lbar theta^2 + p mu theta = mu.
    limit = 2 * 0.5 / (0.25 * 0.5 + math.sqrt(0.25**2 * 0.5**2 + 4 * 0.25 * 20 * 0.5))
    assert rates.theta == pytest.approx(min(limit, CASES[0].theta_min), rel=rounding)
    assert 0 <= rho < np.finfo(number).tiny
