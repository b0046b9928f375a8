"""Advisor: what to expect of a method before a run, on ranks that one has or plans to have.

- :func:`plan` predicts the hours and the bytes of a run on a network.
- ``torchrun ... -m torchcomp doctor`` measures the ranks of a job, their links and a training step.
- The step model behind both: a method is recorded on this machine, and a simulation overlaps it
  with the backward pass, on collectives that are measured or computed.
"""

from torchcomp.advisor.collectives import CollectiveTimes, measure_collectives
from torchcomp.advisor.links import Link
from torchcomp.advisor.prediction import Prediction, Run, Training, plan, values_of
from torchcomp.advisor.recording import record, record_all_reduce, record_average
from torchcomp.advisor.simulation import Compute, Recording, StepTime, simulate, simulate_alone

__all__ = [
    "CollectiveTimes",
    "Compute",
    "Link",
    "Prediction",
    "Recording",
    "Run",
    "StepTime",
    "Training",
    "measure_collectives",
    "plan",
    "record",
    "record_all_reduce",
    "record_average",
    "simulate",
    "simulate_alone",
    "values_of",
]
