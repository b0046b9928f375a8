"""A model of the training step: predict its time with each method, on a link."""

from torchcomp.step_model.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_BF16,
    ALL_TO_ALL,
    KINDS,
    CollectiveTimes,
    Point,
    Times,
    measure_collectives,
)
from torchcomp.step_model.compute import Compute, measure_compute
from torchcomp.step_model.recording import (
    Recording,
    record,
    record_all_reduce,
    record_average,
)
from torchcomp.step_model.simulation import StepTime, simulate, simulate_alone

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_REDUCE_BF16",
    "ALL_TO_ALL",
    "KINDS",
    "CollectiveTimes",
    "Compute",
    "Point",
    "Recording",
    "StepTime",
    "Times",
    "measure_collectives",
    "measure_compute",
    "record",
    "record_all_reduce",
    "record_average",
    "simulate",
    "simulate_alone",
]
