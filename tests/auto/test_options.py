"""auto(...): its options, and the candidates that remain."""

import csv
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

import torchcomp
from tests.support.outcomes import raised_by
from torchcomp import Auto, SpecError
from torchcomp.auto.effects import EFFECTS
from torchcomp.spec import parse_aggregator, parse_registered

ACCURACY = Path(__file__).parents[2] / "benchmarks" / "results" / "accuracy.csv"


def methods(auto: str | Auto) -> list[str]:
    parsed = parse_registered(auto)
    assert isinstance(parsed, Auto)
    return [str(m) for m in parsed.methods([parse_aggregator(c) for c in parsed.candidates])]


@pytest.mark.parametrize(
    "spec",
    [
        "auto",
        "auto(steps=40)",
        'auto(candidates=[ef(topk(0.01)), mean(cast("bf16"))], within="0.5%")',
    ],
)
def test_a_spec_prints_as_it_was_written(spec: str) -> None:
    assert str(parse_registered(spec)) == spec


def test_candidates_are_specs_objects_or_quoted_specs() -> None:
    topk = torchcomp.parse("ef(topk(0.01))")
    wanted = ["mean", "ef(topk(0.01))"]
    for candidates in (["ef(topk(0.01))"], [topk], ("ef(topk(0.01))",)):
        assert methods(Auto(candidates=candidates)) == wanted
    assert methods('auto(candidates=["ef(topk(0.01))"])') == wanted
    assert hash(Auto(candidates=[topk])) == hash(Auto(candidates=[topk]))


def test_mean_comes_first_wherever_it_was_listed() -> None:
    assert methods("auto(candidates=[powersgd(1), mean])") == ["mean", "powersgd(1)"]


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Auto(candidates=[]), "candidates is empty"),
        (lambda: Auto(candidates="ef(topk(0.01))"), "must be a list"),
        (lambda: Auto(candidates=[3]), "a candidate is a method, not 3"),
        (lambda: Auto(within=0.5), 'a percentage such as "0.5%"'),
        (lambda: Auto(within="-1%"), 'a percentage such as "0.5%"'),
        (lambda: Auto(within="x%"), 'a percentage such as "0.5%"'),
        (lambda: Auto(steps=0), "auto: steps must be an integer"),
        (lambda: methods("auto(candidates=[topk(0.1), mean(topk(0.1))])"), "appears twice"),
        (lambda: methods("auto(candidates=[every(4)])"), "every"),
        (lambda: methods("auto(candidates=[mean])"), "no candidate remains"),
        (lambda: methods('auto(candidates=[ef(topk(0.02))], within="1%")'), "was not measured"),
        (lambda: methods('auto(candidates=[powersgd(1)], within="0.5%")'), "no candidate remains"),
        (lambda: torchcomp.parse("auto"), "torchcomp.register"),
        (lambda: torchcomp.parse("ef(auto)"), "auto"),
    ],
)
def test_an_invalid_option_is_refused(make: Callable[[], object], part: str) -> None:
    error = raised_by(make)
    assert isinstance(error, SpecError)
    assert part in str(error)


@pytest.mark.parametrize(
    ("within", "left"),
    [("0%", 2), ("0.1%", 2), ("0.2%", 3), ("0.5%", 4), ("1%", 5)],
)
def test_within_leaves_out_methods_that_have_lost_more(within: str, left: int) -> None:
    assert len(methods(Auto(within=within))) == left


def test_all_effects_are_those_of_the_committed_measurements() -> None:
    of_auto = {
        "bf16": 'mean(cast("bf16"))',
        "mean": "mean",
        "powersgd-1": "powersgd(1)",
    }
    by_seed: dict[str, dict[str, float]] = defaultdict(dict)
    with ACCURACY.open() as file:
        for row in csv.DictReader(file):
            if row["images"] == "test":
                by_seed[row["method"]][row["seed"]] = float(row["accuracy"])
    found = {}
    for method, accuracies in by_seed.items():
        differences = [each - by_seed["ddp"][seed] for seed, each in accuracies.items()]
        spec = of_auto.get(method, method)
        if method in of_auto or "(" in method:
            found[spec] = mean(differences)
    canonical = {
        str(torchcomp.parse(spec)): effect
        for spec, effect in found.items()
        if not spec.startswith("qsr")
    }
    assert EFFECTS.keys() == canonical.keys()
    assert all(abs(EFFECTS[spec] - effect) <= 0.005 for spec, effect in canonical.items())
