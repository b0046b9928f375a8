"""Report: what a comparison of the applied mean with the dense mean has measured."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter


@dataclass
class Sums:
    """What the ranks have added up for one parameter, or for several.

    Attributes:
        dense: squared norm of the dense mean, estimated from its sketch.
        left: squared norm of what the method's law leaves over, estimated from its sketch.
        dot: product of the dense and the applied mean.
        applied: squared norm of the applied mean.
        gradients: squared norms of the ranks' gradients, averaged over the ranks.
        residuals: squared norms of the ranks' residuals, averaged over the ranks, plus that of the
            server residual.
        starved: number of ranks that send nearly nothing of it, although they should.
        changed: number of sampled elements of its slots that have changed between two steps.
        sent: number of elements of the applied mean that are not zero.
        numel: number of elements.
        old: number of sampled elements whose residual has waited long, averaged over the ranks.
        samples: number of sampled elements that wait or were sent, averaged over the ranks.
    """

    dense: float = 0.0
    left: float = 0.0
    dot: float = 0.0
    applied: float = 0.0
    gradients: float = 0.0
    residuals: float = 0.0
    starved: float = 0.0
    changed: float = 0.0
    sent: float = 0.0
    numel: float = 0.0
    old: float = 0.0
    samples: float = 0.0

    @classmethod
    def total(cls, parts: Iterable["Sums"]) -> "Sums":
        """Return the sum of several parameters."""
        return cls(*map(sum, zip(*map(_numbers, parts), strict=True)))


_numbers = attrgetter(*(each.name for each in fields(Sums)))


@dataclass(frozen=True)
class Compared:
    """How the applied mean of one parameter, or of the whole model, compares with the dense mean.

    The norm of the dense mean is estimated from a sketch; see :class:`Report`.

    Attributes:
        cosine: of the angle between the applied mean and the dense mean.
        norm_ratio: norm of the applied mean over that of the dense mean.
        imbalance: norm of what the method's law leaves over, over the norm of the gradients.
        residual_ratio: norm of the residual, with that of the server, over that of the gradients.
        sent: share of the elements that this step has sent.
        old: share of the elements, from a sample, whose residual has waited for at least ``age``
            steps to be sent. NaN without a residual.

    The norms of gradients and residuals are root mean squares over the ranks.
    """

    cosine: float
    norm_ratio: float
    imbalance: float
    residual_ratio: float
    sent: float
    old: float

    @classmethod
    def of(cls, sums: Sums) -> "Compared":
        """Compute the ratios. One whose denominator is zero is NaN."""
        dense, applied = math.sqrt(sums.dense), math.sqrt(sums.applied)
        gradients = math.sqrt(sums.gradients)
        return cls(
            cosine=_ratio(sums.dot, dense * applied),
            norm_ratio=_ratio(applied, dense),
            imbalance=_ratio(math.sqrt(sums.left), gradients),
            residual_ratio=_ratio(math.sqrt(sums.residuals), gradients),
            sent=_ratio(sums.sent, sums.numel),
            old=_ratio(sums.old, sums.samples),
        )


@dataclass(frozen=True)
class Report:
    """The result of one comparison. All ranks get the same.

    Attributes:
        step: number of steps that have finished, with that of the comparison.
        model: of all parameters together.
        parameters: of each parameter, by name.
        gradient_norms: norm of each rank's gradient, in rank order.
        precision: relative standard deviation of the estimated norms of single parameters. It is
            larger where a few columns of a sketch have most of the norm, and for parameters of
            which only a window was compared.
    """

    step: int
    model: Compared
    parameters: Mapping[str, Compared] = field(repr=False)
    gradient_norms: tuple[float, ...]
    precision: float


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
