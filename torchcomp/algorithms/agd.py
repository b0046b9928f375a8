"""AGD: accelerated gradient descent, dense in both directions.

:class:`AGD` carries three sequences and is what 2Direction becomes with identity compressors and
p = tau = 1; it needs no strong convexity. :class:`ConstantMomentumAGD` is Nesterov's scheme for
strongly convex functions (Nesterov, "Lectures on Convex Optimization", 2018, section 2.2).
"""

import math

from torch import Tensor

from torchcomp.algorithms.checks import check_convexity
from torchcomp.algorithms.method import Gradients, Method
from torchcomp.algorithms.parameter_server import DENSE, ParameterServer
from torchcomp.algorithms.two_direction.theory import Constants, learning_rates
from torchcomp.checks import check_positive


class AGD(Method):
    """Accelerated gradient descent in three sequences: x, u and y between them.

    Arguments are those of :class:`~torchcomp.algorithms.method.Method`, and symbols of
    :mod:`~torchcomp.algorithms.two_direction.theory`; in theory lbar is the smoothness L of f.

    Raises:
        SpecError: if a parameter is out of its range.
    """

    def __init__(
        self,
        gradients: Gradients,
        x0: Tensor,
        server: ParameterServer,
        *,
        lbar: float,
        mu: float,
        gamma0: float = 1.0,
    ) -> None:
        super().__init__(gradients, x0, server)
        self.constants = Constants(lbar, mu, 1.0, 1.0, 1.0, 1.0, gamma0)
        self.rho = 1.0 / gamma0
        self.u = self.x

    def _iterate(self, t: int) -> None:
        lr = learning_rates(self.rho, self.constants)
        y = self.server.down(lr.theta * self.u + (1 - lr.theta) * self.x)
        _, g = self.server.uplink(self.gradients(y), DENSE, t)
        self.u = lr.step(g, self.u, y)
        self.x = lr.theta * self.u + (1 - lr.theta) * self.x
        self.rho = lr.rho


class ConstantMomentumAGD(Method):
    """Nesterov's method, with one momentum throughout.

    Arguments are those of :class:`~torchcomp.algorithms.method.Method`, the step size gamma (in
    theory 1/L) and the strong convexity mu of f.

    Raises:
        SpecError: if gamma or mu is not positive, or their product not below 1.
    """

    def __init__(
        self, gradients: Gradients, x0: Tensor, server: ParameterServer, *, gamma: float, mu: float
    ) -> None:
        super().__init__(gradients, x0, server)
        check_positive("gamma", gamma)
        check_positive("mu", mu)
        check_convexity(mu, 1 / gamma, "1/gamma")
        root = math.sqrt(gamma * mu)
        self.gamma, self.momentum = gamma, (1 - root) / (1 + root)
        self.y = self.x

    def _iterate(self, t: int) -> None:
        y = self.server.down(self.y)
        _, g = self.server.uplink(self.gradients(y), DENSE, t)
        x = y - self.gamma * g
        self.y = x + self.momentum * (x - self.x)
        self.x = x
