"""Report: what a comparison has measured. Alarms: what is wrong in it, and what it means."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from torchcomp.aggregators import Law
from torchcomp.checkpoints.checkpoint import listed

SAMPLED = 128  # at most this many elements of a parameter are followed from step to step
Members = Sequence[tuple[int, ...]]
"""What ranks in the job each rank of the exchange stands for."""

_LEAST = 1e-3  # imbalance, relative to the gradients, that rounding in float32 never reaches
_EPS = 2.0**-23  # of float32, in which is measured
_FLOOR = 1e-15  # a norm whose squared elements float32 still has
_LOST = 0.5  # share of the dense mean
_SILENT = 1e-3  # of the other ranks' median norm
_FAINT = 1e-3  # of the model's gradient per element (root mean square)
_EXPECTED = 10  # sampled elements of a parameter that should have been sent


class Compared(NamedTuple):
    """How the applied mean of one parameter, or of the whole model, compares with the dense mean.

    The fields are what the ranks have added up. A ratio is NaN if its denominator is zero. Norms of
    gradients and residuals are root mean squares over the ranks.
    """

    dense: float = 0.0  # squared norm of the dense mean, from sketches
    left: float = 0.0  # squared norm of what the law leaves over, from sketches
    dot: float = 0.0  # product of the dense and the applied mean
    applied: float = 0.0  # squared norm of the applied mean
    gradients: float = 0.0  # squared norm, averaged over the ranks
    residuals: float = 0.0  # the same, with that of the server
    nonzero: float = 0.0  # elements of the applied mean that are not zero
    numel: float = 0.0
    waiting: float = 0.0  # sampled elements whose residual has waited long, mean of the ranks
    samples: float = 0.0  # sampled elements that wait or were sent, mean of the ranks
    changed: float = 0.0  # sampled elements of its slots that have changed between two steps
    starved: float = 0.0  # ranks that send nearly nothing of it, although they should

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
    """A law of a method, and what it is about."""

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


@dataclass(frozen=True)
class Alarm:
    """One finding of the guard. All ranks get the same.

    Attributes:
        step: number of steps that had finished, with the one of the comparison.
        kind: "imbalance", "lost", "starved", "residual changed", "silent rank" or "replicas".
        parameters: names of the parameters that it is about; empty for the whole model.
        ranks: the ranks that it is about, as numbered in the job; empty if it is about all.
        value: what was measured, the worst of the parameters or ranks.
        limit: the limit that it is beyond.
        message: what was found and what to do.
    """

    step: int
    kind: str
    parameters: tuple[str, ...]
    ranks: tuple[int, ...]
    value: float
    limit: float
    message: str

    def is_part_of(self, other: "Alarm") -> bool:
        """Whether another alarm is of the same kind, and about the same parameters and ranks."""
        return (
            self.kind == other.kind
            and set(self.parameters) <= set(other.parameters)
            and set(self.ranks) <= set(other.ranks)
        )

    def __str__(self) -> str:
        return f"guard, step {self.step}: {self.message}"


def alarms(report: Report, members: Members) -> list[Alarm]:
    """Return what is wrong in a comparison."""
    judged = (_imbalance, _lost, _starved, _changed, _silent)
    return [alarm for judge in judged for alarm in judge(report, members)]


def _imbalance(report: Report, members: Members) -> Iterator[Alarm]:
    wrong: dict[str, tuple[float, float]] = {}
    for law, names, *eps in report.laws:
        residual_eps, mean_eps = (max(each, _EPS) for each in eps)
        sums = Compared.total(report.parameters[name] for name in names)
        gradients, left = math.sqrt(sums.gradients), math.sqrt(sums.left)
        # Of the residual and what is added to it, and of the mean.
        kept = sums.residuals + sums.gradients + sums.applied
        rounding = 4 * math.sqrt(residual_eps**2 * kept + mean_eps**2 * sums.applied)
        # And of elements below what a dtype can represent, or the squares of which float32 cannot.
        rounding += _FLOOR + 4 * law.smallest * math.sqrt(sums.numel)
        limit = _LEAST + 2 * law.error  # twice: sketches of a few columns are not exact
        if left > limit * gradients + rounding:
            wrong |= dict.fromkeys(names, (left / gradients if gradients else math.inf, limit))
    if wrong:
        value, limit = max(wrong.values())
        message = "the applied mean and the new residual differ from the gradient and the old "
        message += f"residual by {value:.2g} of the gradient's norm in {listed([*wrong])}. A part "
        message += "of the gradient is lost, or applied more than once: a message is not applied, "
        message += "a scale is wrong, or the residual is not kept"
        yield Alarm(report.step, "imbalance", tuple(wrong), (), value, limit, message)


def _lost(report: Report, members: Members) -> Iterator[Alarm]:
    # An unbiased method can be further off than all of the gradient, and right on average.
    laws = [each for each in report.laws if not each.law.after and each.law.error < 1]
    sums = Compared.total(report.parameters[name] for each in laws for name in each.names)
    applied = sums.dot / sums.dense if sums.dense > _FLOOR**2 else 1.0
    if applied > 1 + _LOST:  # a law as loose as that of a few bits allows it
        message = f"the applied mean is {applied:.1f} times as large as the dense mean. "
        message += "A scale is wrong, or messages are applied more than once"
        yield Alarm(report.step, "imbalance", (), (), applied, 1 + _LOST, message)
    if applied < 1 - _LOST:
        message = f"the method drops {1 - applied:.0%} of the gradient, and keeps no residual. "
        message += "Use it with error feedback, as in ef(...)"
        yield Alarm(report.step, "lost", (), (), 1 - applied, _LOST, message)


def _starved(report: Report, members: Members) -> Iterator[Alarm]:
    others = Compared.total(sums for sums in report.parameters.values() if not sums.starved)
    if not others.samples:
        return
    usual = 1 - others.old

    def counts(sums: Compared) -> bool:
        # Where a sum over a batch is zero, such as for a bias before a normalisation, its rounding
        # errors can be too small for the method's dtype.
        faint = sums.gradients * others.numel <= _FAINT**2 * others.gradients * sums.numel
        # Of a small parameter, all elements are sampled: none was sent.
        enough = usual * sums.samples >= _EXPECTED or sums.numel <= SAMPLED
        return sums.starved > 0 and enough and not faint

    wrong = tuple(name for name, sums in report.parameters.items() if counts(sums))
    if wrong:
        at = _chosen(members, (starved > 0 for starved in report.starved))
        value = max(report.parameters[name].old for name in wrong)
        message = f"{_of(at)} sent nearly nothing of {listed(wrong)} in the last {report.age} steps"
        message += f", but {usual:.0%} of the other elements. Its part of the messages is too small"
        message += ", or it is left out"
        yield Alarm(report.step, "starved", wrong, at, value, 1 - usual, message)


def _changed(report: Report, members: Members) -> Iterator[Alarm]:
    wrong = tuple(name for name, sums in report.parameters.items() if sums.changed > 0)
    if wrong:
        at = _chosen(members, (changed > 0 for changed in report.changed))
        message = f"the residual of {listed(wrong)} on {_of(at)}, or what else the method keeps of "
        message += "it, changed between two steps. It is not what the last step left: something "
        message += "writes it, or restores an old one"
        yield Alarm(report.step, "residual changed", wrong, at, sum(report.changed), 0.0, message)


def _silent(report: Report, members: Members) -> Iterator[Alarm]:
    # A message is measured by what it has taken out of the residual, which is rounded.
    rounded = max([_SILENT, *(4 * law.residual_eps for law in report.laws)])
    norms_of = {"gradient": report.gradient_norms, "message": report.message_norms}
    for (what, norms), limit in zip(norms_of.items(), (_SILENT, rounded), strict=True):
        usual = median(norms) or max(norms)
        wrong = _chosen(members, (norm < limit * usual for norm in norms))
        if wrong:
            value = min(norms) / usual
            message = f"the norm of the {what} of {_of(wrong)} is {value:.1g} times that of the "
            message += "other ranks. Its data may be empty, or its loss may be multiplied by zero"
            yield Alarm(report.step, "silent rank", (), wrong, value, limit, message)
            return


def replica_alarm(step: int, found: Mapping[str, tuple[int, ...]]) -> Alarm:
    """Return the alarm for parameters that differ on some ranks."""
    ranks = tuple(sorted(set().union(*found.values())))
    message = f"{listed(list(found))} on {_of(ranks)} differ from those of the other ranks. The "
    message += "replicas train different models from here on: stop, and load a checkpoint"
    return Alarm(step, "replicas", tuple(found), ranks, float(len(found)), 0.0, message)


def _chosen(members: Members, chosen: Iterable[bool]) -> tuple[int, ...]:
    return tuple(
        sorted(rank for ranks, one in zip(members, chosen, strict=True) if one for rank in ranks)
    )


def _of(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
