"""EF21-P + DIANA: compression in both directions, without acceleration.

Gruntkowska, Tyurin, Richtarik: "EF21-P and Friends: Improved Theoretical Communication Complexity
for Distributed Optimization with Bidirectional Compression", ICML 2023 (arXiv 2209.15218).
"""

from dataclasses import dataclass

from recipes.two_direction.methods.diana import DIANA
from torchcomp.compressors import Compressor


@dataclass(eq=False, repr=False)
class EF21PDIANA(DIANA):
    """DIANA with gradients at the workers' point w. In theory, gamma is
    min(n/(160 omega Lmax), alpha/(100 L), 1/((omega + 1) mu)).
    """

    down: Compressor

    def _start(self) -> None:
        super()._start()
        # All workers have x0, so w needs no message at the start.
        self.w = self.x

    def _iterate(self, t: int) -> None:
        # DIANA's gradient estimate at w, then EF21-P's update of w.
        self.x = self.x - self.gamma * self._estimate(self.w, t)
        self.w = self.w + self.server.down(self.x - self.w, self.down, t)
