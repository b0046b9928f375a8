"""EF21-P: compressed downlink messages with the model, dense uplink messages with gradients.

Gruntkowska, Tyurin, Richtarik: "EF21-P and Friends: Improved Theoretical Communication Complexity
for Distributed Optimization with Bidirectional Compression", ICML 2023 (arXiv 2209.15218).
"""

from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from torchcomp.compressors import Compressor
from torchcomp.two_direction.base import Method
from torchcomp.two_direction.parameter_server import DENSE


@dataclass(eq=False, repr=False)
class EF21P(Method):
    """Gradient descent on x, with gradients at the workers' point w, which follows x."""

    down: Compressor
    _: KW_ONLY
    gamma: float

    def __post_init__(self, x0: Tensor) -> None:
        super().__post_init__(x0)
        self.w = self.x

    def _iterate(self, t: int) -> None:
        _, g = self.server.uplink(self.gradients_at(self.w), DENSE, t)
        self.x = self.x - self.gamma * g  # x' = x - gamma grad f(w)
        # w' = w + C(x' - w). The error of w needs no separate state: it is part of the next
        # difference.
        self.w = self.w + self.server.down(self.x - self.w, self.down, t)
