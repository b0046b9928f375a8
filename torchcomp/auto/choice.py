"""Choice: which method a trial has chosen, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WORTH = 1.05
"""A method is chosen over those before it if it is more than this many times as fast."""

_H = 8  # of the local steps that are proposed


@dataclass(frozen=True)
class Choice:
    """What a trial has measured and chosen. It is the same on all ranks.

    Attributes:
        method: spec of the chosen method.
        seconds: of a step with each method, by spec: the median on the slowest rank.
        alone: seconds of a step without waiting for gradients.
        average: seconds of an uncompressed average of all gradients.
        step: number of steps that had finished.
    """

    method: str
    seconds: Mapping[str, float]
    alone: float
    average: float
    step: int

    @property
    def local_seconds(self) -> float:
        """Seconds of a step with local steps that average every 8 steps, computed."""
        return self.alone + self.average / _H

    def __str__(self) -> str:
        mean, best = self.seconds["mean"], self.seconds[self.method]
        timed = ", ".join(f"{each} {1000 * s:.3g} ms" for each, s in self.seconds.items())
        if self.method == "mean":
            fastest = min(s for each, s in self.seconds.items() if each != "mean")
            why = f"no candidate is {WORTH:.2f} times as fast (the fastest: {mean / fastest:.2f})"
        else:
            why = f"a step is {mean / best:.2f} times as fast as with mean"
        text = f"auto: from step {self.step + 1} on {self.method}, because {why}. Measured: {timed}"
        if self.local_seconds * WORTH < best:
            text += (
                f". LocalSGD with 'every({_H})' would take about {1000 * self.local_seconds:.3g} "
                "ms; it trains in another way, so auto only proposes it"
            )
        return text


def chosen(seconds: Sequence[float]) -> int:
    """Return the index of the method to use.

    It is the first one that no other is more than :data:`WORTH` times as fast as.

    Args:
        seconds: of a step with each method, in the order of preference.
    """
    best = min(seconds)
    return next(index for index, each in enumerate(seconds) if each <= WORTH * best)
