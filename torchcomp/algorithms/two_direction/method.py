"""2Direction: acceleration with compression in both directions.

Tyurin, Richtarik: "2Direction: Theoretically Faster Distributed Training with Bidirectional
Communication Compression", NeurIPS 2023 (arXiv 2305.12379), Algorithms 1 and 2. It is analysed for
convex f and exact local gradients. Comments count the lines of an iteration, (1) to (15).

A worker's second message of an iteration travels with its first of the next, so that there is one
round trip an iteration: lines (12) to (15) are done then.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from torchcomp.algorithms.method import Gradients, Method
from torchcomp.algorithms.parameter_server import DENSE, ParameterServer
from torchcomp.algorithms.two_direction.theory import constants, learning_rates
from torchcomp.compressors import Compressor
from torchcomp.keys import Key, tensor_id

Coin = Callable[[int], bool]
"""From the number of an iteration, from 0, to the side that its coin shows; True is heads."""

VECTORS = ("x", "u", "v", "h", "w", "z", "k", "h_i", "grad_z")
"""A run's vectors, by attribute; the last two are the workers' own, and grad_z may be None."""


class TwoDirectionMethod(Method):
    """Algorithm 1, with the stable form of Algorithm 2's learning rates.

    Args:
        gradients, x0, server: as for :class:`~torchcomp.algorithms.method.Method`.
        up: unbiased compressor of the workers.
        down: contractive compressor of the server.
        coin: replaces the coin that is drawn from the server's seed.
        state: of an earlier run, replaces the start at x0: :data:`VECTORS`, iterations,
            evaluations, rho and second_is_due.
        theory: lbar, mu, and if wanted p, tau, alpha, omega and gamma0, as for
            :func:`~torchcomp.algorithms.two_direction.theory.constants`.

    Attributes:
        u, v, h: what the server holds besides x; (d,).
        w, z, k: what the workers rebuild from downlink messages, and the server holds; (d,).
        h_i: (workers of this process, d).
        grad_z: gradients at z, shaped like h_i; None from when z has moved until they are needed.
        rho: 1/Gamma.

    Raises:
        SpecError: if a parameter is out of its range, or a compressor of the wrong kind.
    """

    def __init__(
        self,
        gradients: Gradients,
        x0: Tensor,
        server: ParameterServer,
        up: Compressor,
        down: Compressor,
        *,
        coin: Coin | None = None,
        state: Mapping[str, Any] | None = None,
        **theory: Any,
    ) -> None:
        super().__init__(gradients, x0, server)
        self.up, self.down = up, down
        self.constants = constants(x0.numel(), up, down, **theory)
        self.rho = 1.0 / self.constants.gamma0
        self._coin = coin or self._drawn_coin
        self.second_is_due = False
        self.grad_z: Tensor | None
        if state is not None:
            vars(self).update(state)
            return
        self.h_i, self.h = self.server.uplink(self.gradients_at(self.x), DENSE, 0)
        self.grad_z = self.h_i
        self.u = self.w = self.z = self.x
        self.v, self.k = self.h, server.down(self.h)

    @property
    def gamma(self) -> float:
        """Gamma; infinite once it is beyond float64's range."""
        return 1.0 / self.rho if self.rho else float("inf")

    def _iterate(self, t: int) -> None:
        server = self.server
        lr = learning_rates(self.rho, self.constants)  # (1)
        y = lr.theta * self.w + (1 - lr.theta) * self.z  # (2)
        mean_m_y = self._uplinks(y, t)  # (12) to (15) of the iteration before, and (3)
        g = self.h + mean_m_y  # (4)
        self.u = lr.step(g, self.u, y)  # (5)
        q = lr.step(self.k, self.w, y)  # (6)
        self.w = q + server.down(self.u - q, self.down, t)  # (7), and (11) on the workers
        self.x = lr.theta * self.u + (1 - lr.theta) * self.z  # (8)
        if self._coin(t):  # (9)
            self.k, self.z, self.grad_z = server.down(self.v), server.down(self.x), None  # (10)
        self.rho, self.second_is_due = lr.rho, True

    def settle(self) -> None:
        """Lines (12) to (15) of the last iteration at once, in a round trip of their own.

        Until then h_i, h and v are those of the iteration before. All ranks call this together.
        """
        if self.second_is_due:
            self._uplinks(None, self.iterations)

    def _uplinks(self, y: Tensor | None, t: int) -> Tensor:
        """Lines (12) to (15) of the iteration before `t` if due, and (3) if there is a y."""
        c, h_i, grad_z, messages = self.constants, self.h_i, self.grad_z, []
        if self.second_is_due:
            grad_z = self.gradients_at(self.z) if grad_z is None else grad_z
            m_z = self.server.encode(grad_z - h_i, self.up, 2 * t - 1)  # (12)
            h_i = h_i + c.beta * m_z.decoded  # (13)
            messages.append(m_z)
        if y is not None:
            messages.append(self.server.encode(self.gradients_at(y) - h_i, self.up, 2 * t))  # (3)
        # An error about any message leaves here, before anything has changed.
        means = self.server.up(*messages)
        if self.second_is_due:
            self.h_i, self.grad_z, self.second_is_due = h_i, grad_z, False
            self.v = (1 - c.tau) * self.v + c.tau * (self.h + means[0])  # (14)
            self.h = self.h + c.beta * means[0]  # (15)
        return means[-1]

    def _drawn_coin(self, t: int) -> bool:
        key = Key(self.server.seed, t, tensor_id("coin"))
        return bool(key.shared().random() < self.constants.p)
