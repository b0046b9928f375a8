"""Prediction: the step time of further methods, from what was measured on this job.

Nothing is trained with them. Each rank records the work of a method on gradients of the model's
size, and simulates a step with the collectives and the computation that were measured.
"""

import time
from collections.abc import Mapping

from torch import Tensor

from torchcomp.bucket import DEFAULT_CAPS, BucketShape, partition
from torchcomp.doctor.job import Job
from torchcomp.doctor.verdict import Row
from torchcomp.local_sgd.schedules import Every
from torchcomp.spec import parse
from torchcomp.step_model import BF16 as BF16_SPEC
from torchcomp.step_model import DDP as DDP_SPEC
from torchcomp.step_model import (
    MOST_ELEMENTS,
    USUAL,
    CollectiveTimes,
    Compute,
    random_values,
    record,
    record_average,
    simulate,
    simulate_alone,
)

ERROR = 0.25
"""More than nine in ten predictions are closer than this to the measured time.

The 90th percentile is 13 % in docs/prediction.md, where the cost of the hook was measured as well.
"""

METHODS = tuple(spec for spec in USUAL if spec not in (DDP_SPEC, BF16_SPEC))
"""What is predicted. The other usual methods are measured."""

_STEPS = 3  # of a recording, the first of which does not count
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
    groups = partition(values.items(), DEFAULT_CAPS)
    shapes = [BucketShape.of(group, values) for group in groups]
    share = min(1.0, cores)
    # Where ranks share cores, a step needs less of a core than its time on the clock.
    compute = Compute.by_elements(shapes, alone * share)
    rows = []
    for spec in METHODS:
        built = parse(spec)
        if isinstance(built, Every):
            average = record_average(values, job.world_size, groups=groups, steps=_STEPS)
            exposed = simulate_alone(average, collectives, cores=cores)
            seconds = alone + exposed / built.h
        else:
            recorded = record(
                built, values, job.world_size, buckets=groups, groups=groups, steps=_STEPS
            )
            seconds = simulate(recorded, compute, collectives, cores=cores).seconds
        passed = time.monotonic() - began
        ranks = job.gather(f"prediction of {spec}", [seconds, passed], job.patience + budget)
        seconds = max(each[0] for each in ranks)
        low, high = seconds * (1 - ERROR), seconds * (1 + ERROR)
        local = isinstance(built, Every)
        rows.append(Row(spec, seconds, low, high, 0, _LOCAL if local else "", local))
        if max(each[1] for each in ranks) > budget:
            break
    return rows
