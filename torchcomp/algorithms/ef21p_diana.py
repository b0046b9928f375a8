"""EF21-P + DIANA: compression in both directions, without acceleration.

Gruntkowska, Tyurin, Richtarik: "EF21-P and Friends: Improved Theoretical Communication Complexity
for Distributed Optimization with Bidirectional Compression", ICML 2023 (arXiv 2209.15218).
"""

from dataclasses import dataclass

from torchcomp.algorithms.checks import check_convexity, check_symbols, require
from torchcomp.algorithms.diana import DIANA
from torchcomp.compressors import Compressor


def step_size(
    smoothness: float, lmax: float, mu: float, *, alpha: float, omega: float, n: int
) -> float:
    """The theory's gamma: min(n/(160 omega Lmax), alpha/(100 L), 1/((omega + 1) mu)).

    Arguments are symbols of `algorithms/checks.py`; SpecError if one is out of its range.
    """
    check_symbols(smoothness=smoothness, lmax=lmax, alpha=alpha, omega=omega, n=n)
    check_convexity(mu, smoothness, "L")
    bounds = [alpha / (100 * smoothness)]
    if omega:
        bounds.append(n / (160 * omega * lmax))
    if mu:
        bounds.append(1 / ((omega + 1) * mu))
    return min(bounds)


@dataclass(eq=False, repr=False)
class EF21PDIANA(DIANA):
    """EF21-P + DIANA: DIANA at the point w that the workers hold, which follows the server's x.

    The server's compressor `down` must be contractive. In theory `gamma` is :func:`step_size`.
    """

    down: Compressor

    def _start(self, declared: float) -> None:
        require("contractive", self.down, self.x.numel(), "down")
        super()._start(declared)
        self.w = self.x

    def _iterate(self, t: int) -> None:
        self.x = self.x - self.gamma * self._estimate(self.w, t)
        self.w = self.w + self.server.down(self.x - self.w, self.down, t)
