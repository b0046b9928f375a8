"""EF21-P alone: compression of the model on the way down, dense gradients on the way up.

Gruntkowska, Tyurin, Richtarik: "EF21-P and Friends: Improved Theoretical Communication Complexity
for Distributed Optimization with Bidirectional Compression", ICML 2023 (arXiv 2209.15218).
"""

from torch import Tensor

from torchcomp.algorithms.checks import require_contractive
from torchcomp.algorithms.method import Gradients, Method
from torchcomp.algorithms.star import DENSE, Star
from torchcomp.checks import check_positive
from torchcomp.compressors import Compressor


class EF21P(Method):
    """EF21-P: gradient steps of x, taken at the point w that the workers hold.

    Args:
        gradients: see :data:`~torchcomp.algorithms.method.Gradients`.
        x0: where to start; (d,).
        star: the communication.
        down: contractive compressor of the server.
        gamma: step size.

    Raises:
        SpecError: if the compressor is not contractive, or gamma not positive.
    """

    def __init__(
        self, gradients: Gradients, x0: Tensor, star: Star, down: Compressor, *, gamma: float
    ) -> None:
        super().__init__(gradients, x0, star)
        check_positive("gamma", gamma)
        require_contractive(down, x0.numel(), "down")
        self.down, self.gamma = down, gamma
        self.x = self.w = self.x0

    @property
    def solution(self) -> Tensor:
        return self.x

    def step(self) -> None:
        (g,) = self.star.up(self.star.encode(self.gradients(self.w), DENSE, self.iterations))
        self.x = self.x - self.gamma * g
        self.w = self.w + self.star.down(self.x - self.w, self.down, self.iterations)
        self.iterations += 1
