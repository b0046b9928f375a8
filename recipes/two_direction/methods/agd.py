"""AGD: accelerated gradient descent. Messages are dense in both directions.

:class:`AGD` has three sequences. It equals 2Direction with identity compressors and p = tau = 1,
and does not require strong convexity. The other two extrapolate from the last two points.
:class:`ConstantMomentumAGD` is Nesterov's scheme for strongly convex functions (Nesterov, "Lectures
on Convex Optimization", 2018, section 2.2). :class:`FISTA` has the growing momentum for convex ones
(Beck, Teboulle, "A Fast Iterative Shrinkage-Thresholding Algorithm", 2009).
"""

import math
from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from torchcomp.two_direction.base import Method
from torchcomp.two_direction.parameter_server import DENSE
from torchcomp.two_direction.theory import Constants, learning_rates


@dataclass(eq=False, repr=False)
class AGD(Method):
    """AGD with three sequences: x, u, and y between them. In theory, lbar is L."""

    _: KW_ONLY
    lbar: float
    mu: float
    gamma0: float = 1.0

    def __post_init__(self, x0: Tensor) -> None:
        super().__post_init__(x0)
        # p = tau = alpha = beta = 1: no coin, and compressors that change nothing.
        self.constants = Constants(self.lbar, self.mu, 1.0, 1.0, 1.0, 1.0, self.gamma0)
        self.rho = 1.0 / self.gamma0
        self.u = self.x

    def _iterate(self, t: int) -> None:
        lr = learning_rates(self.rho, self.constants)
        # Line numbers as in torchcomp/two_direction/method.py. Here w = u and z = x.
        y = self.server.down(lr.theta * self.u + (1 - lr.theta) * self.x)  # (2)
        _, g = self.server.uplink(self.gradients_at(y), DENSE, t)  # (3), (4)
        self.u = lr.step(g, self.u, y)  # (5)
        self.x = lr.theta * self.u + (1 - lr.theta) * self.x  # (8)
        self.rho = lr.rho


@dataclass(eq=False, repr=False)
class _Extrapolation(Method):
    """A gradient step of size gamma from a point extrapolated by a momentum."""

    _: KW_ONLY
    gamma: float

    def __post_init__(self, x0: Tensor) -> None:
        super().__post_init__(x0)
        self.y = self.x

    @abstractmethod
    def _momentum(self, t: int) -> float:
        """Return the momentum of iteration `t`, counted from 0."""

    def _iterate(self, t: int) -> None:
        y = self.server.down(self.y)
        _, g = self.server.uplink(self.gradients_at(y), DENSE, t)
        x = y - self.gamma * g  # gradient step from the extrapolated point
        self.y = x + self._momentum(t) * (x - self.x)  # extrapolation
        self.x = x


@dataclass(eq=False, repr=False)
class ConstantMomentumAGD(_Extrapolation):
    """Nesterov's method with a constant momentum, step size gamma (1/L in theory) and mu."""

    mu: float

    def __post_init__(self, x0: Tensor) -> None:
        super().__post_init__(x0)
        root = math.sqrt(self.gamma * self.mu)  # 1 / sqrt(condition number), if gamma = 1/L
        self.momentum = (1 - root) / (1 + root)

    def _momentum(self, t: int) -> float:
        return self.momentum


@dataclass(eq=False, repr=False)
class FISTA(_Extrapolation):
    """Nesterov's method with a growing momentum, which needs no strong convexity."""

    def _momentum(self, t: int) -> float:
        return t / (t + 3)
