"""EF21-P + DIANA: compression in both directions, without acceleration.

Gruntkowska, Tyurin, Richtarik: "EF21-P and Friends: Improved Theoretical Communication Complexity
for Distributed Optimization with Bidirectional Compression", ICML 2023 (arXiv 2209.15218).
"""

from torch import Tensor

from torchcomp.algorithms.checks import check_convexity, check_symbols, require
from torchcomp.algorithms.diana import DIANA
from torchcomp.algorithms.method import Gradients
from torchcomp.algorithms.parameter_server import ParameterServer
from torchcomp.compressors import Compressor


def step_size(
    smoothness: float, lmax: float, mu: float, *, alpha: float, omega: float, n: int
) -> float:
    """The theory's gamma: min(n/(160 omega Lmax), alpha/(100 L), 1/((omega + 1) mu)).

    Arguments are the symbols of `algorithms/checks.py`.

    Raises:
        SpecError: if a number is out of its range.
    """
    check_symbols(smoothness=smoothness, lmax=lmax, alpha=alpha, omega=omega, n=n)
    check_convexity(mu, smoothness, "L")
    bounds = [alpha / (100 * smoothness)]
    if omega:
        bounds.append(n / (160 * omega * lmax))
    if mu:
        bounds.append(1 / ((omega + 1) * mu))
    return min(bounds)


class EF21PDIANA(DIANA):
    """EF21-P + DIANA: DIANA at the point w that the workers hold, which follows the server's x.

    As DIANA, with a contractive compressor `down` of the server; in theory `gamma` is
    :func:`step_size`.
    """

    def __init__(
        self,
        gradients: Gradients,
        x0: Tensor,
        server: ParameterServer,
        up: Compressor,
        down: Compressor,
        *,
        gamma: float,
    ) -> None:
        require("contractive", down, x0.numel(), "down")
        super().__init__(gradients, x0, server, up, gamma=gamma)
        self.down, self.w = down, self.x

    def _iterate(self, t: int) -> None:
        self.x = self.x - self.gamma * self._estimate(self.w, t)
        self.w = self.w + self.server.down(self.x - self.w, self.down, t)
