"""EF14: the classical error feedback; dense on the way down.

Seide, Fu, Droppo, Li, Yu: "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs", Interspeech 2014.
"""

from torch import Tensor

from torchcomp.algorithms.checks import require_contractive
from torchcomp.algorithms.method import Gradients, Method
from torchcomp.algorithms.star import Star
from torchcomp.checks import check_positive
from torchcomp.compressors import Compressor


class EF14(Method):
    """Error feedback: what a message leaves out of a step is added to the next one.

    Args:
        gradients: see :data:`~torchcomp.algorithms.method.Gradients`.
        x0: where to start; (d,).
        star: the communication.
        up: contractive compressor of the workers.
        gamma: step size.

    Raises:
        SpecError: if the compressor is not contractive, or gamma not positive.
    """

    def __init__(
        self, gradients: Gradients, x0: Tensor, star: Star, up: Compressor, *, gamma: float
    ) -> None:
        super().__init__(gradients, x0, star)
        check_positive("gamma", gamma)
        require_contractive(up, x0.numel(), "up")
        self.up, self.gamma = up, gamma
        self.x = self.x0
        self.e_i = self.x0.new_zeros(len(star.mine), x0.numel())

    @property
    def solution(self) -> Tensor:
        return self.x

    def step(self) -> None:
        wanted = self.e_i + self.gamma * self.gradients(self.x)
        c = self.star.encode(wanted, self.up, self.iterations)
        (mean_c,) = self.star.up(c)
        self.e_i = wanted - c.decoded
        (self.x,) = self.star.broadcast(self.x - mean_c)
        self.iterations += 1
