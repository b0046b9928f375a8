"""2Direction and its reference against a trace from another program, and against each other.

A convergence test is not enough: with an error in the lines of q and k the method still converges.
"""

import itertools
import math
from dataclasses import dataclass
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
    return reference.two_direction(*calls, heads, theory, gamma)


def test_trace():
    run = method()
    for _ in range(8):
        run.step()
    run.finish_iteration()
    sent = run.server.traffic
    assert (sent.up_coordinates, sent.down_coordinates) == (36, 36)
    theory = reference.Theory(lbar=20.0, mu=0.5, p=0.25, tau=0.5, alpha=0.25, beta=0.5)
    *_, twin = itertools.islice(printed(theory), 8)
    for held in ({**vars(run), "gamma": 1 / run.rho}, twin):
        assert held["gamma"] == pytest.approx(1.6758293366, abs=1e-10)
        for line in AFTER_8.split("\n")[1:-1]:
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
        assert 1 / run.rho == pytest.approx(twin["gamma"], rel=1e-10)


@pytest.mark.parametrize(("number", "rounding"), [(np.float64, 1e-12), (np.float32, 1e-3)])
def test_the_stable_recursion_works_after_the_printed_one_has_overflowed(number, rounding):
    values = {"lbar": 20.0, "mu": 0.5, "p": 0.25, "tau": 0.5, "alpha": 0.25, "beta": 0.5}
    c = Constants(**{name: number(value) for name, value in values.items()})
    rho = number(1)
    for _ in range(200_000):
        rates = learning_rates(rho, c)
        rho = rates.rho
    # With rho = 0, theta is the root of p Lbar theta^2 + p mu theta = mu.
    limit = 2 * 0.5 / (0.25 * 0.5 + math.sqrt(0.25**2 * 0.5**2 + 4 * 0.25 * 20 * 0.5))
    assert rates.theta == pytest.approx(min(limit, c.theta_min), rel=rounding)
    assert 0 <= rho < np.finfo(number).tiny
