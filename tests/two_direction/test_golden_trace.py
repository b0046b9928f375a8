"""2Direction against a trace from another program.

A convergence test is not enough: with an error in the lines of q and k the method still converges.

To check a trace of your own, pass its gradients, compressors, coin and Gamma0. A compressor finds
the number of the message in ``key.step`` and the worker in ``key.rank``.
"""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from torchcomp.compressors import Compressor, TopK
from torchcomp.compressors.base import Encoded
from torchcomp.two_direction import Simulated, TwoDirectionMethod
from torchcomp.wire import Field

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
    options |= {"coin": lambda t: t % 3 == 1, "up": Turning(), "down": TopK(k=1)}
    x0 = torch.zeros(4, dtype=torch.float64)
    return TwoDirectionMethod(lambda x: D * x - B, x0, Simulated(2), **{**options, **changes})


@pytest.mark.parametrize(
    ("iterations", "trace", "gamma", "up", "down"),
    [(3, AFTER_3, 1.2136296296, 16, 15), (8, AFTER_8, 1.6758293366, 36, 36)],
)
def test_trace(iterations, trace, gamma, up, down):
    run = method()
    for _ in range(iterations):
        run.step()
    run.finish_iteration()
    held = {**vars(run), "h_1": run.h_i[0]}
    for line in trace.split("\n")[1:-1]:
        name, *numbers = line.split()
        expected = torch.tensor([float(number) for number in numbers], dtype=torch.float64)
        torch.testing.assert_close(held[name], expected, rtol=0, atol=1e-12)
    assert run.gamma == pytest.approx(gamma, abs=1e-10)
    assert (run.server.traffic.up_coordinates, run.server.traffic.down_coordinates) == (up, down)
