"""The base class of methods whose workers compress their messages."""

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from torchcomp.compressors import Compressor
from torchcomp.two_direction.base import Method


@dataclass(eq=False, repr=False)
class CompressedMethod(Method):
    """A method with step size `gamma` whose workers compress their messages."""

    up: Compressor
    _: KW_ONLY
    gamma: float

    def __post_init__(self, x0: Tensor) -> None:
        super().__post_init__(x0)
        self._start()

    @abstractmethod
    def _start(self) -> None:
        """Create all state other than x."""

    # One row per worker of this process, such as the residuals at the start.
    def _zero_rows(self) -> Tensor:
        return self.x.new_zeros(len(self.server.mine), self.x.numel())
