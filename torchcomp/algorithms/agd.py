"""AGD: accelerated gradient descent, dense in both directions.

:class:`AGD` carries three sequences and is what 2Direction becomes with identity compressors and
p = tau = 1; it needs no strong convexity. :class:`ConstantMomentumAGD` is Nesterov's scheme for
strongly convex functions (Nesterov, "Lectures on Convex Optimization", 2018, section 2.2).
"""

import math

from torch import Tensor

from torchcomp.algorithms.checks import check_convexity, check_gamma0
from torchcomp.algorithms.learning_rates import Constants, learning_rates
from torchcomp.algorithms.method import Gradients, Method
from torchcomp.algorithms.star import DENSE, Star
from torchcomp.checks import check_positive


class AGD(Method):
    """Accelerated gradient descent in three sequences: x, u and y between them.

    Args:
        gradients: see :data:`~torchcomp.algorithms.method.Gradients`.
        x0: where to start; (d,).
        star: the communication.
        lbar: inverse of the step size; the smoothness L of f in theory.
        mu: strong convexity of f, at least 0.
        gamma0: Gamma at the start, see :mod:`~torchcomp.algorithms.learning_rates`.

    Raises:
        SpecError: if a parameter is out of its range.
    """

    def __init__(
        self,
        gradients: Gradients,
        x0: Tensor,
        star: Star,
        *,
        lbar: float,
        mu: float,
        gamma0: float = 1.0,
    ) -> None:
        super().__init__(gradients, x0, star)
        check_gamma0(gamma0)
        self.constants = Constants(lbar, mu, p=1.0, tau=1.0, alpha=1.0, beta=1.0)
        self.rho = 1.0 / gamma0
        self.x = self.u = self.x0

    @property
    def solution(self) -> Tensor:
        return self.x

    def step(self) -> None:
        rates = learning_rates(self.rho, self.constants)
        theta = rates.theta
        (y,) = self.star.broadcast(theta * self.u + (1 - theta) * self.x)
        (g,) = self.star.up(self.star.encode(self.gradients(y), DENSE, self.iterations))
        self.u = rates.step(g, self.u, y)
        self.x = theta * self.u + (1 - theta) * self.x
        self.rho = rates.rho
        self.iterations += 1


class ConstantMomentumAGD(Method):
    """Nesterov's method for strongly convex functions, with one momentum throughout.

    Args:
        gradients: see :data:`~torchcomp.algorithms.method.Gradients`.
        x0: where to start; (d,).
        star: the communication.
        gamma: step size; 1/L in theory.
        mu: strong convexity of f, above 0.

    Raises:
        SpecError: if gamma or mu is not positive, or their product not below 1.
    """

    def __init__(
        self, gradients: Gradients, x0: Tensor, star: Star, *, gamma: float, mu: float
    ) -> None:
        super().__init__(gradients, x0, star)
        check_positive("gamma", gamma)
        check_positive("mu", mu)
        check_convexity(mu, 1 / gamma, "1/gamma")
        root = math.sqrt(gamma * mu)
        self.gamma, self.momentum = gamma, (1 - root) / (1 + root)
        self.x = self.y = self.x0

    @property
    def solution(self) -> Tensor:
        return self.x

    def step(self) -> None:
        (y,) = self.star.broadcast(self.y)
        (g,) = self.star.up(self.star.encode(self.gradients(y), DENSE, self.iterations))
        x = y - self.gamma * g
        self.y = x + self.momentum * (x - self.x)
        self.x = x
        self.iterations += 1
