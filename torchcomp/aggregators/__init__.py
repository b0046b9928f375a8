"""Aggregators, one method a file. A new one is its file and its line here."""

from torchcomp.aggregators.base import Aggregator
from torchcomp.aggregators.bidirectional import Bidirectional
from torchcomp.aggregators.ef import EF
from torchcomp.aggregators.mean import Mean

AGGREGATORS: tuple[type[Aggregator], ...] = (
    Mean,
    EF,
    Bidirectional,
)

__all__ = ["AGGREGATORS", "EF", "Aggregator", "Bidirectional", "Mean"]
