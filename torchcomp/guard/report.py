"""Report: what a comparison of the applied mean with the dense mean has measured."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torchcomp.aggregators import Law


class Compared(NamedTuple):
    """How the applied mean of one parameter, or of the whole model, compares with the dense mean.

    The fields are what the ranks have added up. A ratio is NaN if its denominator is zero. Norms of
    gradients and residuals are root mean squares over the ranks.
    """

    # Squared norms, estimated from sketches: of the dense mean, and of what the law leaves over.
    dense: float = 0.0
    left: float = 0.0
    # Product of the dense and the applied mean, and squared norm of the latter.
    dot: float = 0.0
    applied: float = 0.0
    # Squared norms, averaged over the ranks: of gradients, and of residuals with the server's.
    gradients: float = 0.0
    residuals: float = 0.0
    # Numbers of elements: those of the applied mean that are not zero, and all.
    nonzero: float = 0.0
    numel: float = 0.0
    # Sampled elements, averaged over the ranks: residual has waited long; wait or were sent.
    waiting: float = 0.0
    samples: float = 0.0
    # Number of sampled elements of its slots that have changed between two steps.
    changed: float = 0.0
    # Number of ranks that send nearly nothing of it, although they should.
    starved: float = 0.0

    @classmethod
    def total(cls, parts: Iterable["Compared"]) -> "Compared":
        """Return the sum of several parameters."""
        return cls(*map(sum, zip(*parts, strict=True)))

    @property
    def cosine(self) -> float:
        """Of the angle between the applied mean and the dense mean."""
        return _ratio(self.dot, math.sqrt(self.dense) * math.sqrt(self.applied))

    @property
    def norm_ratio(self) -> float:
        """Norm of the applied mean over that of the dense mean, which is estimated."""
        return math.sqrt(_ratio(self.applied, self.dense))

    @property
    def imbalance(self) -> float:
        """Norm of what the method's law leaves over, over the norm of the gradients."""
        return math.sqrt(_ratio(self.left, self.gradients))

    @property
    def residual_ratio(self) -> float:
        """Norm of the residual, with that of the server, over that of the gradients."""
        return math.sqrt(_ratio(self.residuals, self.gradients))

    @property
    def sent(self) -> float:
        """Share of the elements that this step has sent."""
        return _ratio(self.nonzero, self.numel)

    @property
    def old(self) -> float:
        """Share of the elements whose residual has waited for at least ``age`` steps to be sent.

        From a sample. NaN without a residual.
        """
        return _ratio(self.waiting, self.samples)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


class HeldLaw(NamedTuple):
    """A law of a method, and of what it should hold."""

    law: Law
    names: Sequence[str]  # of the parameters, taken together
    residual_eps: float  # relative rounding error of the residual
    mean_eps: float  # that of the mean


@dataclass(frozen=True)
class Report:
    """The result of one comparison. All ranks get the same.

    Attributes:
        step: number of steps that have finished, with that of the comparison.
        model: of all parameters together.
        parameters: of each parameter with any elements, by name.
        gradient_norms: norm of each rank's gradient, in rank order.
        message_norms: norm of what each rank has sent, decoded.
        changed: number of sampled elements of slots that have changed between steps, by rank.
        starved: number of parameters that each rank hardly sends, although it should.
        precision: relative standard deviation of the estimated norms of single parameters. It is
            larger where a few columns of a sketch have most of the norm, and for parameters of
            which only a window was compared.
        age: number of steps after which a value that waits in the residual is old.
        laws: what should hold.
    """

    step: int
    model: Compared
    parameters: Mapping[str, Compared] = field(repr=False)
    gradient_norms: tuple[float, ...]
    message_norms: tuple[float, ...]
    changed: tuple[float, ...]
    starved: tuple[float, ...]
    precision: float
    age: int
    laws: Sequence[HeldLaw] = field(repr=False)
