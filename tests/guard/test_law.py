"""The law of every method, the report of a comparison, and methods of users."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from tests.engine import small
from tests.guard.runs import Watched, plain
from tests.support.cases import thorough
from tests.support.models import METHODS
from torchcomp.aggregators import Aggregator, Law
from torchcomp.aggregators.base import Cost
from torchcomp.engine.state import Kind, Slot
from torchcomp.specs.errors import SpecError

RANKS = 3
STEPS = 10

DROPS = ("topk(0.1)", 'topk(k=3, scope="tensor")', "randk(0.1)")
"""Methods without a residual that drop about half of the gradient, or more."""

INEXACT = (*DROPS, 'randk(k=3, scope="tensor", unbiased=True)')
ROUNDED = {"bf16": 4e-3, "fp16": 1e-3}
"""By dtype that a method names: how much of the gradients' norm its law may leave over."""


def rounding(method, dtype):
    """Return the rounding of a method's law, relative to the norm of the gradients."""
    if "values" in method or 'fp16"), ex' in method.partition("mean")[0]:
        method = ""  # the residual takes the rounding of the messages
    named = [error for name, error in ROUNDED.items() if name in method]
    return max([*named, {torch.bfloat16: 4e-3, torch.float16: 1e-3}.get(dtype, 1e-6)])


def compare(method, dtype):
    def body(exchange):
        watched = Watched(exchange, method, dtype=dtype)
        watched.train(0, STEPS)
        return watched.guard.report, list(map(plain, watched.alarms))

    found = small.on_ranks(RANKS, body)
    # As text, because NaN is not equal to itself.
    assert all(repr(each) == repr(found[0]) for each in found)
    return found[0]


CASES = [(method, torch.float32) for method in METHODS]
MORE = [(m, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64) for m in METHODS]


@pytest.mark.parametrize("case", [*CASES, *thorough(MORE)], ids=str)
def test_the_law_of_each_method_holds_and_all_ranks_get_the_same(case):
    method, dtype = case
    report, alarms = compare(method, dtype)
    lost = {("lost", (), ())} if method in DROPS else set()
    assert {alarm[1:4] for alarm in alarms} == lost
    assert report.step == STEPS
    assert report.parameters.keys() == {"conv", "bias", "matrix", "gain"}
    if method not in INEXACT:
        assert report.model.imbalance <= rounding(method, dtype)


@dataclass(frozen=True)
class Half(Aggregator):
    """Sends half of gradient and residual, times `scale`; may declare a law that is wrong."""

    name: ClassVar[str] = "half"

    scale: float = 1.0
    declared: bool = True
    residual: float = 1.0
    slot: str = "error"
    longer: int = 0  # than the parameters

    def slots(self, shape, world_size, rank):
        sizes = tuple(size + self.longer for size in shape.sizes)
        return (Slot(self.slot, Kind.DEBT, shape.names, sizes, torch.float32),)

    def law(self, shape):
        if not self.declared:
            return None
        return Law(before={"error": -self.residual}, after={"error": self.residual})

    def cost(self, shape, world_size, rank=0, node=1):
        return Cost("allreduce", shape.nbytes)

    def aggregate(self, g, bucket, key):
        before, after = (each[: len(g)] for each in bucket.open(self.slot))
        g.add_(before).mul_(0.5)
        after.copy_(g)
        bucket.exchange.all_reduce(g)
        g.mul_(self.scale / bucket.exchange.world_size)


def test_a_method_of_the_user_is_held_to_its_law_and_not_accused_without_one():
    for method in (Half(declared=False), Half()):
        report, alarms = compare(method, torch.float32)
        assert not alarms
        assert report.model.imbalance < 1e-6
        assert 0.5 < report.model.cosine < 1
    for method in (Half(scale=2), Half(residual=2)):
        report, alarms = compare(method, torch.float32)
        assert report.model.imbalance > 0.3
        step, kind, names, ranks, *_ = alarms[0]
        assert (step, kind, ranks) == (10, "imbalance", ())
        assert {"bias", "conv", "matrix"} <= set(names)


@pytest.mark.parametrize("method", [Half(longer=1), Half(slot="other")])
def test_a_law_about_other_slots_is_refused(method):
    def body(exchange):
        with pytest.raises(SpecError, match="'error'"):
            Watched(exchange, method)

    small.on_ranks(2, body)


def test_the_numbers_of_a_report_are_those_of_plain_float64():
    def body(exchange):
        watched = Watched(exchange, "ef(topk(0.1))")
        means = watched.train(0, STEPS)[-1]
        residual = dict(watched.averager.state.items("error"))
        own = small.gradients(STEPS - 1, exchange.rank, torch.float32)
        return watched.guard.report, means, residual, own

    found = small.on_ranks(RANKS, body)
    report, means, *_ = found[0]

    def squares(tensors):
        return float(sum(t.double().square().sum() for t in tensors))

    def check(compared, names, tolerance):
        own = [[each[name] for name in names] for *_, each in found]
        dense = [sum(each.double() for each in parts) / RANKS for parts in zip(*own, strict=True)]
        applied = [means[name].double() for name in names]
        dot = float(sum((d * a).sum() for d, a in zip(dense, applied, strict=True)))
        gradients = sum(map(squares, own)) / RANKS
        residuals = sum(squares([each[name] for name in names]) for *_, each, _ in found) / RANKS
        sent = sum(int(a.count_nonzero()) for a in applied)
        norm = math.sqrt(squares(applied))
        assert compared.sent == sent / sum(a.numel() for a in applied)
        assert compared.residual_ratio == pytest.approx(math.sqrt(residuals / gradients))
        ratio = norm / math.sqrt(squares(dense))
        assert compared.norm_ratio == pytest.approx(ratio, rel=tolerance)
        if norm:
            cosine = dot / norm / math.sqrt(squares(dense))
            assert compared.cosine == pytest.approx(cosine, rel=tolerance)

    for name, compared in report.parameters.items():
        check(compared, [name], 4 * report.precision)
    check(report.model, list(report.parameters), 4 * report.precision)
    norms = [math.sqrt(squares(own.values())) for *_, own in found]
    assert report.gradient_norms == pytest.approx(norms)


def test_age_is_that_of_the_residual_of_each_rank():
    def body(exchange):
        watched = Watched(exchange, "ef(topk(0.1))")
        watched.train(0, 3)
        ages = {n: torch.zeros(p.numel()) for n, p in small.parameters().items()}
        for step in range(3, 20):
            before = {n: e.clone() for n, e in watched.averager.state.items("error")}
            watched.train(step, step + 1)
            for name, left in watched.averager.state.items("error"):
                # Exact: the gradients of `small` have few digits.
                whole = before[name] + _flat(small.gradients(step, exchange.rank)[name], name)
                waits = (left == whole) & (left != 0)
                ages[name] = (ages[name] + 1) * waits
        return {
            n: float((age >= 10).float().mean()) for n, age in ages.items()
        }, watched.guard.report

    found = small.on_ranks(RANKS, body)
    assert any(old for ages, _ in found for old in ages.values())
    for name, compared in found[0][1].parameters.items():
        assert compared.old == pytest.approx(sum(ages[name] for ages, _ in found) / RANKS)


def _flat(gradient, name):
    """Return a gradient in the order in which the memory has its parameter."""
    strides = small.parameters()[name].stride()
    return gradient.permute(sorted(range(len(strides)), key=lambda d: -strides[d])).reshape(-1)
