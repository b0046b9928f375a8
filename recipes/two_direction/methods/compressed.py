"""The base class of methods whose workers compress their messages."""

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from torchcomp.compressors import Compressor
from torchcomp.specs.checks import check_positive
from torchcomp.two_direction.base import Method
from torchcomp.two_direction.checks import require


@dataclass(eq=False, repr=False)
class CompressedMethod(Method):
    """A method with step size `gamma` whose workers compress their messages."""

    up: Compressor
    _: KW_ONLY
    gamma: float

    # The kind of compressor that `up` must be, for torchcomp.two_direction.checks.require.
    _kind = "contractive"

    def __post_init__(self, x0: Tensor) -> None:
        super().__post_init__(x0)
        check_positive("gamma", self.gamma)
        self._start(require(self._kind, self.up, x0.numel(), "up"))

    @abstractmethod
    def _start(self, declared: float) -> None:
        """Create all state other than x. `declared` is the alpha or omega that `up` declares."""

    # One row per worker of this process, such as the residuals at the start.
    def _zero_rows(self) -> Tensor:
        return self.x.new_zeros(len(self.server.mine), self.x.numel())
