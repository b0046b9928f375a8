"""DIANA: unbiased compression of gradient differences in uplink messages.

Mishchenko, Gorbunov, Takac, Richtarik: "Distributed learning with compressed gradient differences",
2019 (arXiv 1901.09269). Downlink messages are dense.
"""

from torch import Tensor

from recipes.two_direction.methods.compressed import CompressedMethod
from torchcomp.two_direction.checks import require
from torchcomp.two_direction.parameter_server import DENSE


class DIANA(CompressedMethod):
    """DIANA, with an unbiased compressor `up`. In theory, gamma is 1/((1 + 4 omega/n) Lmax).

    Worker i keeps an estimate h_i of the gradient of f_i at the solution, and the server keeps the
    mean h of the h_i. The h_i start as the gradients at x0, which one dense uplink message sends.
    """

    def _start(self) -> None:
        omega = require("unbiased", self.up, self.x.numel(), "up")
        self.beta = 1 / (omega + 1)
        self.h_i, self.h = self.server.uplink(self.gradients_at(self.x), DENSE, 0)

    def _iterate(self, t: int) -> None:
        self.x = self.server.down(self.x - self.gamma * self._estimate(self.x, t))

    def _estimate(self, point: Tensor, t: int) -> Tensor:
        """Return the server's estimate of the gradient at a point that all workers have."""
        # m_i = C(grad f_i(point) - h_i)
        m, mean_m = self.server.uplink(self.gradients_at(point) - self.h_i, self.up, t)
        g = self.h + mean_m  # with the old h
        self.h_i = self.h_i + self.beta * m  # on worker i
        self.h = self.h + self.beta * mean_m  # on the server: stays the mean of the h_i
        return g
