"""Outer steps equal the papers' formulas, and work with compressed pseudo-gradients."""

from functools import partial

import pytest
import torch

import torchcomp
from tests.local_sgd import reference
from tests.local_sgd.script import Script, assert_follows, cosine, momentum, synchronised_steps
from tests.support.cases import thorough
from tests.support.models import kept, seeded
from tests.support.outcomes import assert_close, assert_refused, equal_on_all
from tests.support.ranks import on_threads
from torchcomp.local_sgd import Nesterov, SlowMo

TOTAL, WARMUP = 24, 4
LR = partial(cosine, peak=0.05, warmup=WARMUP, total=TOTAL)
OUTER = {
    "slowmo": (SlowMo(beta=0.6, alpha=0.8), partial(reference.slowmo, 0.6, 0.8)),
    "slowmo-default": ("slowmo", partial(reference.slowmo, 0.7, 1.0)),
    "diloco": ("nesterov(lr=0.6, momentum=0.8)", partial(reference.diloco, 0.6, 0.8)),
    "diloco-default": (Nesterov(), partial(reference.diloco, 0.7, 0.9)),
}


def outer_run(outer, compress="mean", lr=LR, total=TOTAL):
    local = {"outer": outer, "compress": compress}
    script = Script("every(3)", total, lr=lr, local=local, warmup_steps=WARMUP)
    return script.train(0, total)


@pytest.mark.parametrize("which", OUTER)
@pytest.mark.parametrize("compress", ["mean", *thorough(["ef(identity)"])])
def test_equals_the_float64_reference_at_every_step(which, compress):
    outer, synchronise = OUTER[which]
    # The last round is shorter than the others.
    runs = on_threads(4, partial(outer_run, outer, compress, total=TOTAL - 1))
    expected = reference.local_opt(
        4,
        TOTAL - 1,
        update=reference.Momentum,
        rule=reference.every(3),
        lr=LR,
        synchronise=synchronise(),
    )
    assert_follows(runs, expected, 1e-11)
    assert synchronised_steps(runs) == [3, 6, 9, 12, 15, 18, 21, 23]


@pytest.mark.parametrize("outer", [SlowMo(beta=0.0), Nesterov(lr=1.0, momentum=0.0)])
def test_without_momentum_and_at_learning_rate_1_it_is_the_plain_average(outer):
    plain, mine = on_threads(3, outer_run, None), on_threads(3, outer_run, outer)
    for actual, wanted in zip(mine, plain, strict=True):
        assert_close(torch.stack(actual), torch.stack(wanted))


def test_a_tiny_learning_rate_at_the_start_of_a_round_does_not_make_the_momentum_large():
    # 1e-9 at the first step and 0.05 from the second on. Divided by the first, u would be 5e7.
    run = partial(outer_run, SlowMo(), lr=lambda step: 0.05 if step else 1e-9, total=12)
    assert on_threads(2, run)[0][-1].abs().max() < 10


def test_a_round_at_a_learning_rate_of_zero_leaves_the_parameters_alone():
    body = partial(outer_run, SlowMo(), lr=lambda step: 0.05 * (step > 2), total=6)
    weights = on_threads(2, body)[0]
    start = seeded(reference.mlp()).parameters()
    assert torch.equal(weights[2], torch.cat([p.detach().flatten() for p in start]))
    assert not torch.equal(weights[5], weights[2])


def test_the_momentum_is_the_same_on_all_ranks_and_in_the_state():
    def body():
        script = Script("every(2)", optimizer=momentum, local={"outer": Nesterov()})
        script.train(0, 4)
        state = script.sync.state_dict()
        momenta = kept(state, "outer_momentum")
        assert momenta.keys() == state["parameters"].keys()
        return torch.cat([momenta[name].flatten() for name in state["parameters"]])

    momenta = on_threads(3, body)
    assert equal_on_all(momenta)
    assert momenta[0].norm() > 0


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *((SlowMo, "beta", value) for value in (1.0, -0.1, float("nan"))),
        (SlowMo, "alpha", 0),
        *((Nesterov, "lr", value) for value in (-1.0, True)),
        (Nesterov, "momentum", "0.9"),
    ],
)
def test_an_outer_step_that_cannot_be_built(kind, field, value):
    with pytest.raises(torchcomp.SpecError, match=rf"{field}.*{value!r}") as raised:
        kind(**{field: value})
    assert raised.value.field == field


def test_learning_rates_that_differ_between_ranks_inside_a_round():
    def body():
        rank = torch.distributed.get_rank()
        outer_run(SlowMo(), lr=lambda step: 0.1 if rank and step == 1 else 0.05)

    # 0.05 three times on rank 0, and once 0.1 instead on rank 1; the sums are rounded.
    words = ("[0.15", "on rank 0", "[0.2", "on rank 1")
    assert_refused(2, body, torchcomp.RankMismatchError, *words)
