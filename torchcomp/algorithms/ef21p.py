"""EF21-P alone: compression of the model on the way down, dense gradients on the way up.

Gruntkowska, Tyurin, Richtarik: "EF21-P and Friends: Improved Theoretical Communication Complexity
for Distributed Optimization with Bidirectional Compression", ICML 2023 (arXiv 2209.15218).
"""

from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from torchcomp.algorithms.checks import require
from torchcomp.algorithms.method import Method
from torchcomp.algorithms.parameter_server import DENSE
from torchcomp.checks import check_positive
from torchcomp.compressors import Compressor


@dataclass(eq=False, repr=False)
class EF21P(Method):
    """EF21-P: steps of size `gamma` of x, taken at the point w that the workers hold.

    The server's compressor `down` must be contractive.
    """

    down: Compressor
    _: KW_ONLY
    gamma: float

    def __post_init__(self, x0: Tensor) -> None:
        super().__post_init__(x0)
        check_positive("gamma", self.gamma)
        require("contractive", self.down, x0.numel(), "down")
        self.w = self.x

    def _iterate(self, t: int) -> None:
        _, g = self.server.uplink(self.gradients_at(self.w), DENSE, t)
        self.x = self.x - self.gamma * g
        self.w = self.w + self.server.down(self.x - self.w, self.down, t)
