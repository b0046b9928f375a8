"""Means over seeds, their deviations, and differences paired by seed.

All experiments use these, so a "±" means the same on all pages: after a mean, the sample standard
deviation over the seeds; after a difference, its standard error.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_MORE_DIGITS = 2


@dataclass(frozen=True)
class Spread:
    mean: float  # their mean
    deviation: float  # their sample standard deviation; NaN for a single value
    count: int  # how many there are

    @property
    def error(self) -> float:
        """The standard error of the mean; NaN for a single value."""
        return self.deviation / math.sqrt(self.count)

    def with_deviation(self, digits: int = 2, sign: str = "") -> str:
        """Return mean and deviation as text: ``"89.14 ± 1.24"``; a single value stands alone."""
        return _plus_minus(self.mean, self.deviation, digits, sign)

    def with_error(self, digits: int = 2) -> str:
        """Return a difference and its standard error as text, with a sign: ``"+1.17 ± 0.52"``."""
        return _plus_minus(self.mean, self.error, digits, "+")


def spread(values: Iterable[float]) -> Spread:
    listed = list(values)
    deviation = statistics.stdev(listed) if len(listed) > 1 else math.nan
    return Spread(statistics.fmean(listed), deviation, len(listed))


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Spread:
    """Return the spread of the differences ``ours - theirs``, seed by seed."""
    seeds = [seed for seed in ours if seed in theirs]
    if not seeds:
        raise ValueError(f"no seed in common: {sorted(ours)} and {sorted(theirs)}")
    return spread(ours[seed] - theirs[seed] for seed in seeds)


def _plus_minus(mean: float, spread: float, digits: int, sign: str) -> str:
    digits = _enough(spread, digits)
    # Adding 0 turns -0.0 into 0.0.
    text = f"{round(mean, digits) + 0.0:{sign}.{digits}f}"
    return text if math.isnan(spread) else f"{text} ± {spread:.{digits}f}"


def _enough(spread: float, digits: int) -> int:
    """Return up to two digits more, if a spread other than 0 would otherwise print as 0."""
    wider = range(digits, digits + _MORE_DIGITS + 1)
    return next((each for each in wider if round(spread, each)), digits)
