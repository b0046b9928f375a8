"""Server-worker methods. Each one replaces the optimizer step, instead of averaging gradients."""

from torchcomp.algorithms.agd import AGD, FISTA, ConstantMomentumAGD
from torchcomp.algorithms.diana import DIANA
from torchcomp.algorithms.ef14 import EF14
from torchcomp.algorithms.ef21 import EF21
from torchcomp.algorithms.ef21p import EF21P
from torchcomp.algorithms.ef21p_diana import EF21PDIANA
from torchcomp.algorithms.parameter_server import Ranks, Simulated
from torchcomp.algorithms.two_direction import TwoDirection, TwoDirectionMethod
from torchcomp.algorithms.two_direction import theory as parameters

__all__ = [
    "AGD",
    "DIANA",
    "EF14",
    "EF21",
    "EF21P",
    "EF21PDIANA",
    "FISTA",
    "ConstantMomentumAGD",
    "Ranks",
    "Simulated",
    "TwoDirection",
    "TwoDirectionMethod",
    "parameters",
]
