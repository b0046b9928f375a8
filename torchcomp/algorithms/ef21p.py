"""EF21-P alone: compression of the model on the way down, dense gradients on the way up.

Gruntkowska, Tyurin, Richtarik: "EF21-P and Friends: Improved Theoretical Communication Complexity
for Distributed Optimization with Bidirectional Compression", ICML 2023 (arXiv 2209.15218).
"""

from torch import Tensor

from torchcomp.algorithms.checks import require
from torchcomp.algorithms.method import CompressedMethod, Gradients
from torchcomp.algorithms.parameter_server import DENSE, ParameterServer
from torchcomp.compressors import Compressor


class EF21P(CompressedMethod):
    """EF21-P: gradient steps of x, taken at the point w that the workers hold.

    Instead of a compressor up it takes `down`, a contractive compressor of the server.
    """

    def __init__(
        self,
        gradients: Gradients,
        x0: Tensor,
        server: ParameterServer,
        down: Compressor,
        *,
        gamma: float,
    ) -> None:
        super().__init__(gradients, x0, server, DENSE, gamma=gamma)
        require("contractive", down, x0.numel(), "down")
        self.down = down

    def _start(self, declared: float) -> None:
        self.w = self.x

    def _iterate(self, t: int) -> None:
        _, g = self.server.uplink(self.gradients(self.w), self.up, t)
        self.x = self.x - self.gamma * g
        self.w = self.w + self.server.down(self.x - self.w, self.down, t)
