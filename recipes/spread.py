"""Means over seeds, their deviations, and differences paired by seed.

All experiments use these, so a "±" means the same on all pages: after a mean, the sample standard
deviation over the seeds; after a difference, its standard error.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The mean and the spread of some values.

    Attributes:
        mean: their mean.
        deviation: their sample standard deviation; NaN for a single value.
        count: how many there are.
    """

    mean: float
    deviation: float
    count: int

    @property
    def error(self) -> float:
        """The standard error of the mean; NaN for a single value."""
        return self.deviation / math.sqrt(self.count)

    def with_deviation(self, digits: int = 2) -> str:
        """Return mean and deviation as text: ``"89.14 ± 1.24"``; a single value stands alone."""
        return _plus_minus(f"{self.mean:.{digits}f}", self.deviation, digits)

    def with_error(self, digits: int = 2) -> str:
        """Return a difference and its standard error as text, with a sign: ``"+1.17 ± 0.52"``."""
        # Adding 0 turns -0.0 into 0.0.
        return _plus_minus(f"{round(self.mean, digits) + 0.0:+.{digits}f}", self.error, digits)


def spread(values: Iterable[float]) -> Spread:
    """Return mean and deviation of at least one value."""
    listed = list(values)
    deviation = statistics.stdev(listed) if len(listed) > 1 else math.nan
    return Spread(statistics.fmean(listed), deviation, len(listed))


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Spread:
    """Return the spread of the differences ``ours - theirs``, seed by seed.

    Args:
        ours: a value by seed.
        theirs: a value by seed. Only the seeds of both are compared.

    Raises:
        ValueError: if they have no seed in common.
    """
    seeds = [seed for seed in ours if seed in theirs]
    if not seeds:
        raise ValueError(f"no seed in common: {sorted(ours)} and {sorted(theirs)}")
    return spread(ours[seed] - theirs[seed] for seed in seeds)


def _plus_minus(mean: str, spread: float, digits: int) -> str:
    return mean if math.isnan(spread) else f"{mean} ± {spread:.{digits}f}"
