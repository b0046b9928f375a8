"""A model of the training step: predict its time with each method, on a link."""

from torchcomp.step_model.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_BF16,
    ALL_TO_ALL,
    KINDS,
    CollectiveTimes,
    Point,
    measure_collectives,
)

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_REDUCE_BF16",
    "ALL_TO_ALL",
    "KINDS",
    "CollectiveTimes",
    "Point",
    "measure_collectives",
]
