"""Aggregators. To add a method, write its file and list it here."""

from torchcomp.aggregators.base import Aggregator, Law, planned_traffic, planned_two_levels
from torchcomp.aggregators.bidirectional import Bidirectional
from torchcomp.aggregators.dgc import DGC
from torchcomp.aggregators.ef21 import EF21
from torchcomp.aggregators.one_way import EF, Mean
from torchcomp.aggregators.powersgd import PowerSGD

AGGREGATORS: tuple[type[Aggregator], ...] = (Mean, EF, Bidirectional, PowerSGD, EF21, DGC)

__all__ = ["AGGREGATORS", "DGC", "EF", "EF21", "Aggregator", "Bidirectional", "Law", "Mean"]
__all__ += ["PowerSGD", "planned_traffic", "planned_two_levels"]
