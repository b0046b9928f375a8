"""Method: what all methods of this package have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from torchcomp.algorithms.star import Star
from torchcomp.errors import SpecError

Gradients = Callable[[Tensor], Tensor]
"""From a point, (d,), to the exact gradients there of the functions f_i of this process's workers,
in their order: (workers of this process, d), of the point's dtype."""


class Method(ABC):
    """A method for min_x f(x), f = (1/n) sum f_i, where worker i alone can evaluate f_i.

    Args:
        gradients: see :data:`Gradients`.
        x0: where to start; 1-D, floating point, the same on all ranks.
        star: the communication.

    Attributes:
        x0: where it started.
        iterations: number of iterations done.
        evaluations: gradients that each worker has computed.

    Raises:
        SpecError: if x0 is not a vector of finite floating-point numbers.
    """

    def __init__(self, gradients: Gradients, x0: Tensor, star: Star) -> None:
        _check_start(x0)
        # The caller may go on to change what x0 stands for.
        self.x0 = x0.detach().clone()
        self.star = star
        self.iterations = 0
        self.evaluations = 0
        self._gradients = gradients

    @property
    @abstractmethod
    def solution(self) -> Tensor:
        """The point that the method has arrived at; 1-D."""

    @abstractmethod
    def step(self) -> None:
        """One iteration.

        Raises:
            NonFiniteError: on all ranks, if a worker's gradient holds a NaN or an infinity.
        """

    def gradients(self, point: Tensor) -> Tensor:
        """Gradients of this process's workers at a point; (workers of this process, d).

        Raises:
            SpecError: if the user's function returns something of another shape or dtype.
        """
        rows = self._gradients(point)
        wanted = (len(self.star.mine), point.numel())
        if not isinstance(rows, Tensor) or rows.shape != wanted or rows.dtype != point.dtype:
            raise SpecError(
                f"gradients(point) must return a {point.dtype} tensor of shape {wanted}, one row "
                f"for each worker of this process, not {_described(rows)}"
            )
        self.evaluations += 1
        # The user's function may write its next result to the same memory.
        return rows.detach().clone()


def _check_start(x0: Tensor) -> None:
    vector = isinstance(x0, Tensor) and x0.dim() == 1 and x0.numel() and x0.is_floating_point()
    if not vector:
        raise SpecError(
            f"x0 must be a vector of floating-point numbers, not {_described(x0)}", "x0"
        )
    if not bool(torch.isfinite(x0).all()):
        raise SpecError("x0 holds a NaN or an infinity: there is no way from there", "x0")


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"{value!r:.60}"
