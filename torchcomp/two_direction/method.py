"""2Direction: acceleration with compression in both directions.

Tyurin, Richtarik, "2Direction", NeurIPS 2023 (arXiv 2305.12379), Algorithms 1 and 2, for convex f
and exact local gradients. Comments number the lines of an iteration, (1) to (15):

    (1)   all         learning rates theta', gamma', Gamma' from Gamma
    (2)   worker      y = theta' w + (1 - theta') z
    (3)   uplink      m_y_i = C_up(grad f_i(y) - h_i)
    (4)   server      g = h + mean m_y_i
    (5)   server      u' = step(g, u)
    (6)   server      q = step(k, w)
    (7)   downlink    w' = q + C_down(u' - q)
    (8)   server      x' = theta' u' + (1 - theta') z
    (9)   all         toss a coin that shows heads with probability p
    (10)  downlink    on heads k' = v and z' = x', both dense; otherwise k' = k and z' = z
    (11)  worker      the same q and w' from the downlink message, with the old k and w
    (12)  uplink      m_z_i = C_up(grad f_i(z') - h_i)
    (13)  worker      h_i' = h_i + beta m_z_i
    (14)  server      v' = (1 - tau) v + tau (h + mean m_z_i)
    (15)  server      h' = h + beta mean m_z_i

x is the iterate. u is the server's accelerated sequence, and w is the workers' approximation of u.
z and k are the x and v of the last heads. h_i estimates grad f_i(z), and h is the mean of the h_i.
v averages the estimates of grad f(z) with momentum tau. The second uplink message (12) is sent with
the first (3) of the next iteration: one round trip each. Lines (12) to (15) run at its start.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from torchcomp.compressors import Compressor
from torchcomp.engine.keys import Key, tensor_id
from torchcomp.two_direction.base import Gradients, Method
from torchcomp.two_direction.parameter_server import DENSE, ParameterServer
from torchcomp.two_direction.theory import constants, learning_rates

Coin = Callable[[int], bool]
"""A function that maps the number of an iteration, from 0, to its coin; True is heads."""

VECTORS = ("x", "u", "v", "h", "w", "z", "k", "h_i", "grad_z")
"""Attributes with the vectors of a run. The last two belong to workers, and grad_z can be None."""


class TwoDirectionMethod(Method):
    """Algorithm 1, with a numerically stable form of Algorithm 2's learning rates.

    Args:
        gradients, x0, server: see :class:`~torchcomp.two_direction.Method`.
        up: unbiased compressor of the workers.
        down: contractive compressor of the server.
        coin: replaces the coin that is drawn from the server's seed.
        state: state of an earlier run, which replaces the start at x0: :data:`VECTORS`,
            iterations, evaluations, rho and second_is_due.
        theory: lbar and mu, and optionally p, tau and gamma0; see
            :func:`~torchcomp.two_direction.theory.constants`.

    Attributes:
        u, v, h: vectors of the server; (d,).
        w, z, k: vectors of the server that workers rebuild from downlink messages; (d,).
        h_i: the workers' shifts; (workers of this process, d).
        grad_z: gradients at z, shaped like h_i. None after z has moved, until they are computed.
        rho: 1/Gamma.
        second_is_due: whether lines (12) to (15) of the last iteration have not run yet.

    Raises:
        SpecError: if a parameter is out of range, or a compressor has the wrong kind.
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
        # Start: h_i = grad f_i(x0), h = mean h_i, w = z = u = x0, k = v = h. One dense exchange.
        self.h_i, self.h = self.server.uplink(self.gradients_at(self.x), DENSE, 0)
        self.grad_z = self.h_i
        self.u = self.w = self.z = self.x
        self.v, self.k = self.h, server.down(self.h)

    @property
    def gamma(self) -> float:
        """Gamma. It is infinite when it exceeds the range of float64."""
        return 1.0 / self.rho if self.rho else float("inf")

    def _iterate(self, t: int) -> None:
        server = self.server
        lr = learning_rates(self.rho, self.constants)  # (1)
        y = lr.theta * self.w + (1 - lr.theta) * self.z  # (2)
        mean_m_y = self._uplinks(y, t)  # (12) to (15) of the last iteration, and (3)
        g = self.h + mean_m_y  # (4)
        self.u = lr.step(g, self.u, y)  # (5)
        q = lr.step(self.k, self.w, y)  # (6)
        self.w = q + server.down(self.u - q, self.down, t)  # (7), and (11) on the workers
        self.x = lr.theta * self.u + (1 - lr.theta) * self.z  # (8)
        if self._coin(t):  # (9)
            # The old v: line (14) of this iteration has not run yet.
            self.k, self.z, self.grad_z = server.down(self.v), server.down(self.x), None  # (10)
        self.rho, self.second_is_due = lr.rho, True

    def finish_iteration(self) -> None:
        """Run lines (12) to (15) of the last iteration now, in a separate round trip.

        Without this call, they run in the next iteration. All ranks must call this together.
        """
        if self.second_is_due:
            self._uplinks(None, self.iterations)

    def _uplinks(self, y: Tensor | None, t: int) -> Tensor:
        """Run lines (12) to (15) of the iteration before `t` if due, and (3) if `y` is not None.

        Return the mean of the last message that was sent.
        """
        c, h_i, grad_z, messages = self.constants, self.h_i, self.grad_z, []
        if self.second_is_due:
            # z moves only on heads, so most iterations can use the cached gradients.
            grad_z = self.gradients_at(self.z) if grad_z is None else grad_z
            # Message numbers: 2t for y of iteration t, 2t + 1 for z. This is z of t - 1.
            m_z = self.server.encode(grad_z - h_i, self.up, 2 * t - 1)  # (12)
            h_i = h_i + c.beta * m_z.decoded  # (13)
            messages.append(m_z)
        if y is not None:
            # With the h_i of line (13). On the server, line (15) updates h before line (4) uses it.
            messages.append(self.server.encode(self.gradients_at(y) - h_i, self.up, 2 * t))  # (3)
        # This can raise. The method must be unchanged then, so assign attributes only below.
        means = self.server.up(*messages)
        if self.second_is_due:
            self.h_i, self.grad_z, self.second_is_due = h_i, grad_z, False
            self.v = (1 - c.tau) * self.v + c.tau * (self.h + means[0])  # (14)
            self.h = self.h + c.beta * means[0]  # (15), after (14), which uses the old h
        return means[-1]

    def _drawn_coin(self, t: int) -> bool:
        key = Key(self.server.seed, t, tensor_id("coin"))
        return bool(key.shared().random() < self.constants.p)
