"""2Direction: the method, its theory, and a torch optimizer that runs it."""

from torchcomp.algorithms.two_direction.method import TwoDirectionMethod
from torchcomp.algorithms.two_direction.optimizer import TwoDirection

__all__ = ["TwoDirection", "TwoDirectionMethod"]
