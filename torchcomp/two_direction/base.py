"""The base class of 2Direction and of methods that are compared with it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import InitVar, dataclass

from torch import Tensor

from torchcomp.specs.errors import SpecError
from torchcomp.two_direction.parameter_server import ParameterServer

Gradients = Callable[[Tensor], Tensor]
"""Maps a point, (d,), to the exact gradients of the f_i of this process's workers, one row each."""


@dataclass(eq=False, repr=False)
class Method(ABC):
    """A method for min_x f(x), f = (1/n) sum f_i, where only worker i can evaluate f_i.

    Args:
        gradients: a function that maps a point, shape (d,), to the exact gradients of the f_i at
            that point: one row for each worker of this process, in order, with the point's dtype.
        x0: the starting point; 1-D, floating point, the same on all ranks.
        server: the communication between the server and the workers.

    Attributes:
        x: the current iterate; (d,).
        iterations: number of iterations done.
        evaluations: number of gradients that each worker has computed.

    Raises:
        SpecError: if x0 is not a vector of finite floating-point numbers, or an option is out of
            range.
    """

    gradients: Gradients
    x0: InitVar[Tensor]
    server: ParameterServer

    def __post_init__(self, x0: Tensor) -> None:
        vector = isinstance(x0, Tensor) and x0.dim() == 1 and x0.numel() > 0
        if not (vector and x0.is_floating_point()):
            raise SpecError(
                f"x0 must be a vector of floating-point numbers, not {_described(x0)}", "x0"
            )
        if not x0.isfinite().all():
            raise SpecError("x0 contains a NaN or an infinity; start at a finite point", "x0")
        # Copy: the caller might change x0 in place later.
        self.x = x0.detach().clone()
        self.iterations = self.evaluations = 0

    @property
    def solution(self) -> Tensor:
        """The current estimate of the minimum; 1-D."""
        return self.x

    def step(self) -> None:
        """Do one iteration.

        Raises:
            SpecError: if `gradients` returns a wrong shape or dtype.
            NonFiniteError: on all ranks, if a worker's gradient contains a NaN or an infinity.
        """
        self._iterate(self.iterations)
        # Not reached if the iteration raises: it can then be repeated with the same random draws.
        self.iterations += 1

    @abstractmethod
    def _iterate(self, t: int) -> None:
        """Do iteration `t`, counted from 0. If this raises, the method is unchanged."""

    def gradients_at(self, point: Tensor) -> Tensor:
        """Return the user's gradients at a point. Raise SpecError if their form is wrong."""
        rows = self.gradients(point)
        wanted = (len(self.server.mine), point.numel())
        if not isinstance(rows, Tensor) or rows.shape != wanted or rows.dtype != point.dtype:
            raise SpecError(
                f"gradients(point) must return a {point.dtype} tensor of shape {wanted}, one row "
                f"for each worker of this process, not {_described(rows)}"
            )
        self.evaluations += 1
        # Copy: the user's function might write its next result to the same memory.
        return rows.detach().clone()


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"{value!r:.60}"
