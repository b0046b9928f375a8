"""Quadratics f_i(x) = 1/2 x'Sx - b_i'x with eigenvalues spaced evenly in log from 1/kappa to 1."""

import math

import torch
from torch import Tensor

from torchcomp.two_direction.base import Gradients


class Quadratics:
    """The mean of n quadratics with L = Lmax = 1 and mu = 1/kappa, as a ``race.Problem``.

    Args:
        kappa: condition number.
        n: number of workers.
        seed: of the b_i. Their mean does not depend on n.
        d: number of coordinates.
    """

    def __init__(self, kappa: float, n: int, seed: int, d: int) -> None:
        self.n, self.d, self.mu = n, d, 1 / kappa
        generator = torch.Generator().manual_seed(seed)
        self.mean = torch.randn(d, dtype=torch.float64, generator=generator)
        own = torch.randn(n, d, dtype=torch.float64, generator=generator)
        self.b = self.mean + own - own.mean(0)
        self.s = torch.logspace(-math.log10(kappa), 0, d, dtype=torch.float64)
        self.start = float((self.mean.square() / self.s).sum())

    def gradients(self, workers: range) -> Gradients:
        """Return the function that evaluates the gradients of these workers."""
        b = self.b[workers.start : workers.stop]
        return lambda x: self.s * x - b

    def value(self, x: Tensor) -> float:
        """Return f(x) - f*, relative to its value at x = 0."""
        return float((self.s * (x - self.mean / self.s).square()).sum()) / self.start
