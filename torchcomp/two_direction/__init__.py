"""2Direction: a method that replaces the optimizer step, with messages compressed both ways."""

from torchcomp.two_direction import theory
from torchcomp.two_direction.method import Method, TwoDirectionMethod
from torchcomp.two_direction.optimizer import TwoDirection
from torchcomp.two_direction.parameter_server import ParameterServer, Ranks, Simulated

__all__ = ["Method", "ParameterServer", "Ranks", "Simulated", "TwoDirection"]
__all__ += ["TwoDirectionMethod", "theory"]
