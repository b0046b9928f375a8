"""A model of the training step: predict its time with each method, on a link."""

from torchcomp.step_model.activities import Recording
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
from torchcomp.step_model.links import Link, LinkTimes
from torchcomp.step_model.recording import (
    record,
    record_all_reduce,
    record_average,
)
from torchcomp.step_model.simulation import StepTime, simulate, simulate_alone
from torchcomp.step_model.table import table
from torchcomp.step_model.training import (
    BF16,
    DDP,
    USUAL,
    Prediction,
    Run,
    Training,
    values_of,
)

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_REDUCE_BF16",
    "ALL_TO_ALL",
    "BF16",
    "DDP",
    "KINDS",
    "USUAL",
    "CollectiveTimes",
    "Compute",
    "Link",
    "LinkTimes",
    "Point",
    "Prediction",
    "Recording",
    "Run",
    "StepTime",
    "Times",
    "Training",
    "measure_collectives",
    "measure_compute",
    "record",
    "record_all_reduce",
    "record_average",
    "simulate",
    "simulate_alone",
    "table",
    "values_of",
]
