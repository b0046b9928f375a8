"""DIANA: unbiased compression of gradient differences on the way up.

Mishchenko, Gorbunov, Takac, Richtarik: "Distributed learning with compressed gradient differences",
2019 (arXiv 1901.09269). The way down is dense.
"""

from torch import Tensor

from torchcomp.algorithms.checks import require_unbiased
from torchcomp.algorithms.method import Gradients, Method
from torchcomp.algorithms.star import DENSE, Star
from torchcomp.checks import check_at_least_0, check_count, check_positive
from torchcomp.compressors import Compressor


def step_size(lmax: float, omega: float, n: int) -> float:
    """The theory's gamma: 1/((1 + 4 omega/n) Lmax).

    Args:
        lmax: the largest smoothness of an f_i.
        omega: relative variance of the uplink's compressor.
        n: number of workers.

    Raises:
        SpecError: if a number is out of its range.
    """
    check_positive("lmax", lmax)
    check_at_least_0("omega", omega)
    check_count("n", n)
    return 1 / ((1 + 4 * omega / n) * lmax)


class DIANA(Method):
    """DIANA; the h_i start at the gradients of x0, in one dense exchange.

    Args:
        gradients: see :data:`~torchcomp.algorithms.method.Gradients`.
        x0: where to start; (d,).
        star: the communication.
        up: unbiased compressor of the workers.
        gamma: step size; :func:`step_size` in theory.

    Raises:
        SpecError: if the compressor is not unbiased, or gamma not positive.
    """

    def __init__(
        self, gradients: Gradients, x0: Tensor, star: Star, up: Compressor, *, gamma: float
    ) -> None:
        super().__init__(gradients, x0, star)
        check_positive("gamma", gamma)
        self.beta = 1 / (require_unbiased(up, x0.numel(), "up") + 1)
        self.up, self.gamma = up, gamma
        self.x = self.x0
        self.h_i = self.gradients(self.x0)
        (self.h,) = star.up(star.encode(self.h_i, DENSE, 0))

    @property
    def solution(self) -> Tensor:
        return self.x

    def step(self) -> None:
        g = self._estimate(self.x)
        (self.x,) = self.star.broadcast(self.x - self.gamma * g)
        self.iterations += 1

    def _estimate(self, point: Tensor) -> Tensor:
        """The server's estimate of the gradient at a point that all workers hold."""
        m = self.star.encode(self.gradients(point) - self.h_i, self.up, self.iterations)
        (mean_m,) = self.star.up(m)
        g = self.h + mean_m
        self.h_i = self.h_i + self.beta * m.decoded
        self.h = self.h + self.beta * mean_m
        return g
