"""Local steps equal Algorithm 2 of the paper and the outer steps of theirs, at every step."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import torchcomp
from tests.local_sgd import reference
from tests.local_sgd.script import Script, constant, cosine, synchronised_steps, trained
from tests.support.models import seeded
from tests.support.outcomes import assert_close
from tests.support.ranks import on_threads
from torchcomp.local_sgd import Nesterov, SlowMo
from torchcomp.reference import qsr

TOTAL, WARMUP = 23, 4  # the last round of three steps is shorter than the others
EVERY = lambda step, lr: 3  # noqa: E731
skips = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


def twin(spec="every(3)", rule=EVERY, synchronise=None, skipped=(), **local):
    """A run, and its reference in float64."""
    lr = constant if skipped else partial(cosine, peak=0.1, warmup=WARMUP, total=TOTAL + 1)
    script = {"spec": spec, "lr": lr, "local": local}
    return SimpleNamespace(
        script=script | {"total_steps": TOTAL, "warmup_steps": WARMUP},
        reference={"rule": rule, "lr": lr, "skipped": frozenset(skipped)},
        synchronise=synchronise,
        skipped=skipped,
    )


TOPK = 'ef(topk(k=3, scope="tensor"))'
TWINS = {
    "every": twin(),
    "qsr": twin("qsr(alpha=0.2, h_base=2)", qsr(alpha=0.2, h_base=2, warmup=WARMUP)),
    "compressed": twin(compress=TOPK, synchronise=partial(reference.ef_topk, 4, 3)),
    "slowmo": twin(
        outer=SlowMo(beta=0.6, alpha=0.8), synchronise=partial(reference.slowmo, 0.6, 0.8)
    ),
    "diloco": twin(
        outer="nesterov(lr=0.6, momentum=0.8)", synchronise=partial(reference.diloco, 0.6, 0.8)
    ),
    "diloco's defaults": twin(outer=Nesterov(), synchronise=partial(reference.diloco, 0.7, 0.9)),
    # (rank, step) pairs that overflow: inside a round, at its end, and a whole round.
    "a skipped step": twin(skipped={(1, 4)}),
    "an average in a skipped step": twin(skipped={(3, 5)}),
    "a skipped round": twin(skipped={(1, 3), (1, 4), (1, 5)}),
}


def run_of(case):
    options = dict(case.script)
    if case.skipped:
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    script = Script(**options)
    overflows = [(script.rank, step) in case.skipped for step in range(TOTAL)]
    return [script.step(step, float("inf") if bad else 1.0) for step, bad in enumerate(overflows)]


@skips
@pytest.mark.parametrize("name", TWINS)
def test_equals_the_float64_reference_at_every_step(name):
    case = TWINS[name]
    runs = on_threads(4, run_of, case)
    options = {"update": reference.Momentum, **case.reference}
    synchronise = case.synchronise and case.synchronise()
    expected = list(reference.local_opt(4, TOTAL, synchronise=synchronise, **options))
    for actual, (weights, _) in zip(zip(*runs, strict=True), expected, strict=True):
        for mine, wanted in zip(actual, weights, strict=True):
            assert_close(mine, wanted, 1e-11)
    ends = [step for step, (_, averaged) in enumerate(expected, 1) if averaged]
    assert synchronised_steps(runs) == ends
    horizon = {name: case.script[name] for name in ("lr", "total_steps", "warmup_steps")}
    assert ends == torchcomp.sync_steps(case.script["spec"], **horizon)
    lengths = {end - start for start, end in zip([0, *ends], ends, strict=False)}
    assert len(lengths) > (2 if "qsr" in name else 1), "the setting does not exercise the rule"


def test_slowmo_at_a_tiny_or_no_learning_rate_at_the_start_of_a_round():
    options = {"total_steps": 6, "local": {"outer": SlowMo()}}
    # Divided by 1e-9, the momentum would be 5e7.
    tiny = partial(trained, 6, lr=lambda step: 0.05 if step else 1e-9, **options)
    assert on_threads(2, tiny)[0][-1].abs().max() < 10
    weights = on_threads(2, partial(trained, 6, lr=lambda step: 0.05 * (step > 2), **options))[0]
    start = seeded(reference.mlp()).parameters()
    assert torch.equal(weights[2], torch.cat([p.detach().flatten() for p in start]))
    assert not torch.equal(weights[5], weights[2])
