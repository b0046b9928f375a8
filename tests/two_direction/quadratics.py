"""Test functions with known constants and solution: f_i(x) = 1/2 x'A_i x - b_i'x, in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quadratics:
    """The functions of n workers. A is (n, d, d), symmetric and positive definite. b is (n, d)."""

    a: Tensor
    b: Tensor

    @property
    def n(self) -> int:
        return len(self.a)

    @property
    def x0(self) -> Tensor:
        return torch.zeros_like(self.b[0])

    @property
    def smoothness(self) -> float:
        return float(torch.linalg.eigvalsh(self.a.mean(0))[-1])

    @property
    def lmax(self) -> float:
        return float(torch.linalg.eigvalsh(self.a)[:, -1].max())

    @property
    def mu(self) -> float:
        return float(torch.linalg.eigvalsh(self.a.mean(0))[0])

    @property
    def solution(self) -> Tensor:
        return torch.linalg.solve(self.a.mean(0), self.b.mean(0))

    def gradients(self, x: Tensor) -> Tensor:
        return self.a @ x - self.b

    def gap(self, x: Tensor) -> float:
        off = x - self.solution
        return float(off @ self.a.mean(0) @ off) / 2


def quadratics(n: int = 4, d: int = 12, condition: float = 40.0, seed: int = 0) -> Quadratics:
    """Make workers with different minima and different curvatures along the same directions."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    basis = torch.linalg.qr(normal(d, d))[0]
    spectrum = torch.logspace(0, -1, d, base=condition, dtype=torch.float64)
    each = spectrum * (0.5 + torch.rand(n, d, dtype=torch.float64, generator=generator))
    return Quadratics(basis @ torch.diag_embed(each) @ basis.t(), normal(n, d))
