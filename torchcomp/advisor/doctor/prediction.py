"""Prediction: the step time of further methods, from what was measured on this job.

Nothing is trained with them. Each rank records the work of a method on gradients of the model's
size, and simulates a step with the collectives and the computation that were measured.
"""

import time
from collections.abc import Mapping

from torch import Tensor

from torchcomp.advisor.collectives import CollectiveTimes
from torchcomp.advisor.doctor.job import Job
from torchcomp.advisor.doctor.verdict import Row
from torchcomp.advisor.prediction import BF16, DDP, USUAL, Prediction, Run
from torchcomp.advisor.recording import MOST_ELEMENTS, random_values

ERROR = 0.25
"""More than nine in ten predictions are closer than this to the measured time.

The 90th percentile is 13 % in docs/prediction.md, where the cost of the hook was measured as well.
"""

METHODS = tuple(spec for spec in USUAL if spec not in (DDP, BF16))
"""What is predicted. The other usual methods are measured."""

_STEPS = 1000  # of the run whose mean step is predicted
_LOCAL = "local steps: each rank trains alone between two averages, see docs/methods/local-sgd.md"


def predicted_rows(
    job: Job,
    parameters: Mapping[str, Tensor],
    alone: float,
    collectives: CollectiveTimes,
    cores: float,
    budget: float,
) -> list[Row]:
    """Predict the step times of :data:`METHODS`, as far as there is time. All ranks call this.

    Args:
        job: this rank.
        parameters: shapes and dtypes of the model's parameters, by name.
        alone: seconds of a step without any exchange, of the slowest rank.
        collectives: measured among these ranks.
        cores: cores of each rank.
        budget: about how many seconds this may take.
    """
    if sum(each.numel() for each in parameters.values()) > MOST_ELEMENTS:
        return []
    began = time.monotonic()
    values = random_values(parameters, job.device)
    # Where ranks share cores, a step needs less of a core than its time on the clock.
    run = Run(job.world_size, _STEPS, alone * min(1.0, cores))
    rows = []
    for spec in METHODS:
        prediction = Prediction(spec, values, run)
        seconds = prediction.step(collectives, cores=cores).seconds
        passed = time.monotonic() - began
        ranks = job.gather(f"prediction of {spec}", [seconds, passed], job.patience + budget)
        seconds = max(each[0] for each in ranks)
        low, high = seconds * (1 - ERROR), seconds * (1 + ERROR)
        caveat = _LOCAL if prediction.local else ""
        rows.append(Row(spec, seconds, low, high, 0, caveat, prediction.local))
        if max(each[1] for each in ranks) > budget:
            break
    return rows
