"""EF21: error feedback by compressed differences of gradients; dense on the way down.

Richtarik, Sokolov, Fatkhullin: "EF21: A New, Simpler, Theoretically Better, and Practically Faster
Error Feedback", NeurIPS 2021 (arXiv 2106.05203), Algorithm 2.
"""

import torch
from torch import Tensor

from torchcomp.algorithms.checks import require_contractive
from torchcomp.algorithms.method import Gradients, Method
from torchcomp.algorithms.star import Star
from torchcomp.checks import check_positive
from torchcomp.compressors import Compressor


class EF21(Method):
    """EF21; the g_i start at 0, so that the first messages are compressed gradients.

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
        self.x, self.g = self.x0, torch.zeros_like(self.x0)
        self.g_i = self.x0.new_zeros(len(star.mine), x0.numel())

    @property
    def solution(self) -> Tensor:
        return self.x

    def step(self) -> None:
        c = self.star.encode(self.gradients(self.x) - self.g_i, self.up, self.iterations)
        (mean_c,) = self.star.up(c)
        self.g_i = self.g_i + c.decoded
        self.g = self.g + mean_c
        (self.x,) = self.star.broadcast(self.x - self.gamma * self.g)
        self.iterations += 1
