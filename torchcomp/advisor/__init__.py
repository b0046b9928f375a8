"""Advisor: what to expect of a method before a run, on ranks that one has or plans to have.

- :func:`plan` predicts the hours and the bytes of a run on a network.
- ``torchrun ... -m torchcomp doctor`` measures the ranks of a job, their links and a training step.
- The step model behind both: a method is recorded on this machine, and a simulation overlaps it
  with the backward pass, on collectives that are measured or computed.
"""

from torchcomp.advisor.activities import Call, Recording, Submitted, Work
from torchcomp.advisor.collectives import (
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
from torchcomp.advisor.compute import Compute, measure_compute
from torchcomp.advisor.links import Link, LinkTimes
from torchcomp.advisor.prediction import (
    BF16,
    DDP,
    USUAL,
    Prediction,
    Run,
    Training,
    plan,
    values_of,
)
from torchcomp.advisor.recording import record, record_all_reduce, record_average
from torchcomp.advisor.simulation import StepTime, simulate, simulate_alone

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_REDUCE_BF16",
    "ALL_TO_ALL",
    "BF16",
    "DDP",
    "KINDS",
    "USUAL",
    "Call",
    "CollectiveTimes",
    "Compute",
    "Link",
    "LinkTimes",
    "Point",
    "Prediction",
    "Recording",
    "Run",
    "StepTime",
    "Submitted",
    "Times",
    "Training",
    "Work",
    "measure_collectives",
    "measure_compute",
    "plan",
    "record",
    "record_all_reduce",
    "record_average",
    "simulate",
    "simulate_alone",
    "values_of",
]
