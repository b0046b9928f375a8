"""Method: what all methods of this package have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass

from torch import Tensor

from torchcomp.algorithms.checks import require
from torchcomp.algorithms.parameter_server import ParameterServer
from torchcomp.checks import check_positive
from torchcomp.compressors import Compressor
from torchcomp.errors import SpecError

Gradients = Callable[[Tensor], Tensor]
"""From a point, (d,), to the exact gradients there of the functions f_i of this process's workers,
in their order: (workers of this process, d), of the point's dtype."""


@dataclass(eq=False, repr=False)
class Method(ABC):
    """A method for min_x f(x), f = (1/n) sum f_i, where worker i alone can evaluate f_i.

    Args:
        gradients: see :data:`Gradients`.
        x0: where to start; 1-D, floating point, the same on all ranks.
        server: the communication.

    Attributes:
        x: where the method has arrived; (d,).
        iterations: number of iterations done.
        evaluations: gradients that each worker has computed.

    Raises:
        SpecError: if x0 is not a vector of finite floating-point numbers, or an option is out of
            its range.
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
            raise SpecError("x0 holds a NaN or an infinity: there is no way from there", "x0")
        # The caller may go on to change x0.
        self.x = x0.detach().clone()
        self.iterations = 0
        self.evaluations = 0

    @property
    def solution(self) -> Tensor:
        """The point that the method has arrived at; 1-D."""
        return self.x

    def step(self) -> None:
        """One iteration.

        Raises:
            SpecError: if `gradients` returns another shape or dtype than it must.
            NonFiniteError: on all ranks, if a worker's gradient holds a NaN or an infinity.
        """
        self._iterate(self.iterations)
        self.iterations += 1

    @abstractmethod
    def _iterate(self, t: int) -> None:
        """Iteration `t`, from 0; an error leaves the method as it was."""

    def gradients_at(self, point: Tensor) -> Tensor:
        """What the user's function returns at a point; raises unless it has the right form."""
        rows = self.gradients(point)
        wanted = (len(self.server.mine), point.numel())
        if not isinstance(rows, Tensor) or rows.shape != wanted or rows.dtype != point.dtype:
            raise SpecError(
                f"gradients(point) must return a {point.dtype} tensor of shape {wanted}, one row "
                f"for each worker of this process, not {_described(rows)}"
            )
        self.evaluations += 1
        # The user's function may write its next result to the same memory.
        return rows.detach().clone()


@dataclass(eq=False, repr=False)
class CompressedMethod(Method):
    """A method of step size `gamma` whose workers compress their messages.

    Its compressor `up` must be contractive, for DIANA unbiased.
    """

    up: Compressor
    _: KW_ONLY
    gamma: float

    _kind = "contractive"

    def __post_init__(self, x0: Tensor) -> None:
        super().__post_init__(x0)
        check_positive("gamma", self.gamma)
        self._start(require(self._kind, self.up, x0.numel(), "up"))

    @abstractmethod
    def _start(self, declared: float) -> None:
        """What the method holds besides x, given the alpha or omega that `up` declares."""

    def _zero_rows(self) -> Tensor:
        return self.x.new_zeros(len(self.server.mine), self.x.numel())


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"{value!r:.60}"
