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

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from typing import Any

from torch import Tensor

from torchcomp.compressors import Compressor
from torchcomp.engine.keys import Key, tensor_id
from torchcomp.specs.errors import SpecError
from torchcomp.two_direction.parameter_server import DENSE, ParameterServer
from torchcomp.two_direction.theory import constants, learning_rates

Gradients = Callable[[Tensor], Tensor]  # see Method
Coin = Callable[[int], bool]  # from the number of an iteration, from 0; True is heads
# Attributes with the vectors of a run. The last two belong to workers, and grad_z can be None.
VECTORS = ("x", "u", "v", "h", "w", "z", "k", "h_i", "grad_z")


@dataclass(eq=False, repr=False)
class Method(ABC):
    """A method for min_x f(x), f = (1/n) sum f_i, where only worker i can evaluate f_i.

    Args:
        gradients: a function that maps a point, shape (d,), to the exact gradients of the f_i at
            that point: one row for each worker of this process, in order, with the point's dtype.
        x0: the starting point; 1-D, floating point, the same on all ranks.
        server: the communication between the server and the workers.

    Attributes:
        x: the current iterate, the estimate of the minimum; (d,).
        iterations: number of iterations done.
        evaluations: number of gradients that each worker has computed.
    """

    gradients: Gradients
    x0: InitVar[Tensor]
    server: ParameterServer

    def __post_init__(self, x0: Tensor) -> None:
        vector = isinstance(x0, Tensor) and x0.dim() == 1 and x0.numel() > 0
        if not (vector and x0.is_floating_point() and x0.isfinite().all()):
            raise SpecError(f"x0 must be a vector of finite floats, not {_described(x0)}", "x0")
        self.x = x0.detach().clone()  # the caller might change x0 later
        self.iterations = self.evaluations = 0

    def step(self) -> None:
        """Do one iteration. Raise NonFiniteError on all ranks if a gradient is not finite."""
        self._iterate(self.iterations)
        self.iterations += 1  # not if it raises: it can then be repeated with the same draws

    @abstractmethod
    def _iterate(self, t: int) -> None:
        """Do iteration `t`, counted from 0. If this raises, the method is unchanged."""

    def gradients_at(self, point: Tensor) -> Tensor:
        """Return the user's gradients at a point. Raise SpecError if their form is wrong."""
        rows = self.gradients(point)
        wanted = (len(self.server.mine), point.numel())
        if not isinstance(rows, Tensor) or rows.shape != wanted or rows.dtype != point.dtype:
            expected = f"a {point.dtype} tensor of shape {wanted}, one row for each worker"
            raise SpecError(f"gradients(point) must return {expected}, not {_described(rows)}")
        self.evaluations += 1
        return rows.detach().clone()  # the next result might be in the same memory


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"{value!r:.60}"


class TwoDirectionMethod(Method):
    """Algorithm 1, with a numerically stable form of Algorithm 2's learning rates.

    Args:
        gradients: see :class:`~torchcomp.two_direction.Method`.
        x0: the first point; (d,).
        server: what exchanges the messages.
        up: unbiased compressor of the workers.
        down: contractive compressor of the server.
        coin: replaces the coin that is drawn from the server's seed.
        state: attributes of an earlier run, which replace the start at x0.
        theory: lbar and mu, and optionally p, tau and gamma0; see
            :func:`~torchcomp.two_direction.theory.constants`.

    Attributes:
        u, v, h, w, z, k: vectors of the server; (d,).
        h_i, grad_z: the workers' shifts and gradients at z, None until they are computed; rows.
        rho: 1/Gamma.
        second_is_due: whether lines (12) to (15) of the last iteration have not run yet.
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
        # Start: h_i = grad f_i(x0), h = mean h_i, w = z = u = x0, k = v = h.
        self.h_i, self.h = self.server.uplink(self.gradients_at(self.x), DENSE, 0)
        self.grad_z = self.h_i
        self.u = self.w = self.z = self.x
        self.v, self.k = self.h, server.down(self.h)

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
        """Run lines (12) to (15) of the last iteration now, not in the next one."""
        if self.second_is_due:
            self._uplinks(None, self.iterations)

    def _uplinks(self, y: Tensor | None, t: int) -> Tensor:
        """Run (12) to (15) of `t` - 1 if due, (3) if `y` is not None; return the last mean."""
        c, h_i, grad_z, messages = self.constants, self.h_i, self.grad_z, []
        if self.second_is_due:
            grad_z = self.gradients_at(self.z) if grad_z is None else grad_z
            # Message numbers: 2t for y of iteration t, 2t + 1 for z. This is z of t - 1.
            m_z = self.server.encode(grad_z - h_i, self.up, 2 * t - 1)  # (12)
            h_i = h_i + c.beta * m_z.decoded  # (13)
            messages.append(m_z)
        if y is not None:
            # With the h_i of line (13). On the server, line (15) runs before line (4).
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
