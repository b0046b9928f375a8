"""DIANA: unbiased compression of gradient differences on the way up.

Mishchenko, Gorbunov, Takac, Richtarik: "Distributed learning with compressed gradient differences",
2019 (arXiv 1901.09269). The way down is dense.
"""

from torch import Tensor

from torchcomp.algorithms.checks import check_symbols
from torchcomp.algorithms.method import CompressedMethod
from torchcomp.algorithms.parameter_server import DENSE


def step_size(lmax: float, omega: float, n: int) -> float:
    """The theory's gamma: 1/((1 + 4 omega/n) Lmax).

    Arguments are symbols of `algorithms/checks.py`; SpecError if one is out of its range.
    """
    check_symbols(lmax=lmax, omega=omega, n=n)
    return 1 / ((1 + 4 * omega / n) * lmax)


class DIANA(CompressedMethod):
    """DIANA, whose `up` is unbiased; the h_i start at the gradients of x0, in one dense exchange.

    In theory `gamma` is :func:`step_size`.
    """

    _kind = "unbiased"

    def _start(self, declared: float) -> None:
        self.beta = 1 / (declared + 1)
        self.h_i, self.h = self.server.uplink(self.gradients_at(self.x), DENSE, 0)

    def _iterate(self, t: int) -> None:
        self.x = self.server.down(self.x - self.gamma * self._estimate(self.x, t))

    def _estimate(self, point: Tensor, t: int) -> Tensor:
        """The server's estimate of the gradient at a point that all workers hold."""
        m, mean_m = self.server.uplink(self.gradients_at(point) - self.h_i, self.up, t)
        g = self.h + mean_m
        self.h_i = self.h_i + self.beta * m
        self.h = self.h + self.beta * mean_m
        return g
