"""auto(...): its options, and the methods that it times."""

import pytest
import torch

import torchcomp
from tests.support.models import mlp, wrap
from tests.support.outcomes import raised_by
from tests.support.ranks import on_threads
from torchcomp import Auto, SpecError
from torchcomp.specs.spec import candidates, parse_registered


def methods(auto):
    parsed = parse_registered(auto)
    assert isinstance(parsed, Auto)
    return [str(method) for method in candidates(parsed)]


@pytest.mark.parametrize(
    "spec",
    ["auto", "auto(steps=40)", 'auto(candidates=[ef(topk(0.01)), mean(cast("bf16"))], steps=60)'],
)
def test_a_spec_prints_as_it_was_written(spec):
    assert str(parse_registered(spec)) == spec


def test_candidates_are_specs_objects_or_quoted_specs_and_mean_comes_first():
    topk = torchcomp.parse("ef(topk(0.01))")
    quoted = 'auto(candidates=["ef(topk(0.01))"])'
    for each in (Auto(candidates=["ef(topk(0.01))"]), Auto(candidates=(topk,)), quoted):
        assert methods(each) == ["mean", "ef(topk(0.01))"]
    assert hash(Auto(candidates=[topk])) == hash(Auto(candidates=[topk]))
    assert methods("auto(candidates=[powersgd(1), mean], steps=12)") == ["mean", "powersgd(1)"]
    bits = [f'bidirectional(quantize("{each}"), quantize("{each}"))' for each in ("int8", "int4")]
    assert methods("auto(steps=20)") == ["mean", 'mean(cast("bf16"))', *bits]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Auto(candidates="ef(topk(0.01))"), "candidates"),
        (lambda: methods(Auto(candidates=[])), "candidates"),
        (lambda: methods("auto(candidates=[mean])"), "candidates"),
        (lambda: methods("auto(candidates=[topk(0.1), mean(topk(0.1))])"), "candidates"),
        (lambda: methods(Auto(candidates=[3])), None),
        (lambda: methods("auto(candidates=[every(4)])"), None),
        (lambda: Auto(steps=0), "steps"),
        (lambda: methods("auto(steps=19)"), "steps"),
        (lambda: methods("auto(candidates=[powersgd(1)], steps=11)"), "steps"),
        (lambda: torchcomp.parse("auto"), None),
        (lambda: torchcomp.parse("ef(auto)"), None),
    ],
)
def test_an_invalid_option_is_refused(make, field):
    error = raised_by(make)
    assert isinstance(error, SpecError)
    assert error.field == field


def test_only_register_takes_auto_and_only_one_that_can_be_made():
    def body():
        model = wrap(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = torchcomp.register(model, "mean")
        local = {"total_steps": 4, "compress": "auto"}
        return [
            raised_by(lambda: torchcomp.register(wrap(mlp()), "auto(candidates=[ef(topk(2.0))])")),
            raised_by(lambda: handle.swap("auto")),
            raised_by(lambda: torchcomp.JointSpar(wrap(mlp()), budget=0.5, compress="auto")),
            raised_by(lambda: torchcomp.LocalSGD(wrap(mlp()), optimizer, "every(2)", **local)),
        ]

    for errors in on_threads(2, body):
        assert all(isinstance(error, SpecError) for error in errors)
