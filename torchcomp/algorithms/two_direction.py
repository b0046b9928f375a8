"""2Direction: acceleration with compression in both directions.

Tyurin, Richtarik: "2Direction: Theoretically Faster Distributed Training with Bidirectional
Communication Compression", NeurIPS 2023 (arXiv 2305.12379), Algorithms 1 and 2. It is analysed for
convex f and exact local gradients. Comments count the lines of an iteration, (1) to (15).

A worker's second message of an iteration travels with its first of the next, so that there is one
round trip an iteration: lines (12) to (15) are done then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from torchcomp.algorithms.checks import check_gamma0
from torchcomp.algorithms.learning_rates import learning_rates
from torchcomp.algorithms.method import Gradients, Method
from torchcomp.algorithms.parameters import constants
from torchcomp.algorithms.star import DENSE, Message, Star
from torchcomp.compressors import Compressor
from torchcomp.keys import Key, tensor_id

Coin = Callable[[int], bool]
"""From the number of an iteration, from 0, to the side that its coin shows; True is heads."""


@dataclass
class Server:
    """What the server holds; all of shape (d,). x is what the method returns."""

    u: Tensor
    w: Tensor
    z: Tensor
    x: Tensor
    k: Tensor
    v: Tensor
    h: Tensor


@dataclass
class Workers:
    """What workers hold: w, z and k, (d,), rebuilt from messages and the same on all; and h_i.

    `h_i` and `grad_z`, the gradients at z, are (workers of this process, d). `grad_z` is None from
    when z has moved until it is needed.
    """

    w: Tensor
    z: Tensor
    k: Tensor
    h_i: Tensor
    grad_z: Tensor | None


class Second(NamedTuple):
    """The second message of an iteration, and what `Workers` holds once it has been sent."""

    m_z: Message
    h_i: Tensor
    grad_z: Tensor


class TwoDirectionMethod(Method):
    """Algorithm 1, with the stable form of Algorithm 2's learning rates.

    Args:
        gradients: see :data:`~torchcomp.algorithms.method.Gradients`.
        x0: where to start; (d,).
        star: the communication.
        up: unbiased compressor of the workers.
        down: contractive compressor of the server.
        lbar: inverse of the step size; see :func:`~torchcomp.algorithms.parameters.lbar`.
        mu: strong convexity of f, at least 0.
        p: probability of the coin; by default 1/(omega + 1).
        tau: momentum of v; by default 1/(omega + 1).
        alpha: contraction constant to calculate with; by default what `down` declares.
        omega: relative variance to calculate with; by default what `up` declares.
        gamma0: Gamma at the start.
        coin: replaces the coin that is drawn from the star's seed.
        state: where an earlier run was, see :meth:`state_dict`; replaces the start at x0.

    Attributes:
        server: the server's state.
        workers: the workers' state.
        rho: 1/Gamma.

    Raises:
        SpecError: if a parameter is out of its range, or a compressor of the wrong kind.
    """

    def __init__(
        self,
        gradients: Gradients,
        x0: Tensor,
        star: Star,
        up: Compressor,
        down: Compressor,
        *,
        lbar: float,
        mu: float,
        p: float | None = None,
        tau: float | None = None,
        alpha: float | None = None,
        omega: float | None = None,
        gamma0: float = 1.0,
        coin: Coin | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(gradients, x0, star)
        self.up, self.down = up, down
        self.constants = constants(
            x0.numel(), up, down, lbar=lbar, mu=mu, p=p, tau=tau, alpha=alpha, omega=omega
        )
        check_gamma0(gamma0)
        self.rho = 1.0 / gamma0
        self._coin = coin or self._drawn_coin
        self._second_is_due = False
        if state is None:
            self._start()
        else:
            self.load_state_dict(state)

    @property
    def solution(self) -> Tensor:
        return self.server.x

    @property
    def gamma(self) -> float:
        """Gamma; infinite once it is beyond float64's range."""
        return 1.0 / self.rho if self.rho else float("inf")

    def _start(self) -> None:
        x0, h_i = self.x0, self.gradients(self.x0)
        (h,) = self.star.up(self.star.encode(h_i, DENSE, 0))
        (k,) = self.star.broadcast(h)
        self.server = Server(u=x0, w=x0, z=x0, x=x0, k=k, v=h, h=h)
        self.workers = Workers(w=x0, z=x0, k=k, h_i=h_i, grad_z=h_i)

    def step(self) -> None:
        t, star, server, workers = self.iterations, self.star, self.server, self.workers
        rates = learning_rates(self.rho, self.constants)  # (1)
        theta = rates.theta

        y = theta * workers.w + (1 - theta) * workers.z  # (2)
        mean_m_y = self._uplinks(y)  # (12) to (15) of the iteration before, and (3)

        g = server.h + mean_m_y  # (4)
        server.u = rates.step(g, server.u, y)  # (5)
        q = rates.step(server.k, server.w, y)  # (6)
        message = star.down(server.u - q, self.down, t)  # (7)
        server.w = q + message
        server.x = theta * server.u + (1 - theta) * server.z  # (8)
        coin = self._coin(t)  # (9)
        if coin:
            server.k, server.z = star.broadcast(server.v, server.x)  # (10)

        workers.w = rates.step(workers.k, workers.w, y) + message  # (11)
        if coin:
            workers.k, workers.z, workers.grad_z = server.k, server.z, None
        self.rho, self.iterations, self._second_is_due = rates.rho, t + 1, True

    def settle(self) -> None:
        """Lines (12) to (15) of the last iteration at once, in a round trip of their own.

        Until then h_i, h and v are those of the iteration before. All ranks call this together.
        """
        if self._second_is_due:
            second = self._second()
            self._receive(second, *self.star.up(second.m_z))

    def _uplinks(self, y: Tensor) -> Tensor:
        star, second = self.star, self._second() if self._second_is_due else None
        h_i = self.workers.h_i if second is None else second.h_i
        m_y = star.encode(self.gradients(y) - h_i, self.up, 2 * self.iterations)  # (3)
        if second is None:
            return star.up(m_y)[0]
        # An error about either message leaves here, before anything has changed.
        mean_m_z, mean_m_y = star.up(second.m_z, m_y)
        self._receive(second, mean_m_z)
        return mean_m_y

    def _second(self) -> Second:
        workers = self.workers
        grad_z = self.gradients(workers.z) if workers.grad_z is None else workers.grad_z
        call = 2 * self.iterations - 1
        m_z = self.star.encode(grad_z - workers.h_i, self.up, call)  # (12)
        h_i = workers.h_i + self.constants.beta * m_z.decoded  # (13)
        return Second(m_z, h_i, grad_z)

    def _receive(self, second: Second, mean_m_z: Tensor) -> None:
        server, workers, c = self.server, self.workers, self.constants
        workers.h_i, workers.grad_z = second.h_i, second.grad_z
        server.v = (1 - c.tau) * server.v + c.tau * (server.h + mean_m_z)  # (14)
        server.h = server.h + c.beta * mean_m_z  # (15)
        self._second_is_due = False

    def _drawn_coin(self, t: int) -> bool:
        key = Key(self.star.seed, t, tensor_id("coin"))
        return bool(key.shared().random() < self.constants.p)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a run needs to go on bit for bit, of this rank; tensors and numbers."""
        return {
            "iterations": self.iterations,
            "evaluations": self.evaluations,
            "rho": self.rho,
            "second_is_due": self._second_is_due,
            "server": dict(vars(self.server)),
            "workers": dict(vars(self.workers)),
            "traffic": self.star.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where an earlier run, with the same arguments, has been."""
        self.iterations, self.evaluations = state["iterations"], state["evaluations"]
        self.rho, self._second_is_due = state["rho"], state["second_is_due"]
        self.server, self.workers = Server(**state["server"]), Workers(**state["workers"])
        self.star.load_state_dict(state["traffic"])
