"""A step of JointSpar waits twice, at its end, and no kernel is launched for each parameter."""

import pytest
import torch
from torch import nn

import torchcomp
from tests.support.counting import counted
from tests.support.models import loss_of, rows, seeded, wrap
from tests.support.ranks import with_fake_ranks
from torchcomp.jointspar import LARS, JointSpar

OPTIONS = {
    "shared": {},
    "per-rank": {"selection": "per-rank"},
}


def deep(tensors):
    """Two layers that have a bias and some further vectors each."""
    return seeded(nn.Sequential(*[Layer(tensors) for _ in range(2)]))


class Layer(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))
        self.more = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(tensors))

    def forward(self, x):
        return x @ self.weight + torch.stack(list(self.more)).sum(0)


def backward_pass(options, tensors=3):
    """What the last of some backward passes launches and waits for. None: without JointSpar."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = wrap(deep(tensors), bucket_cap_mb=25)
    if options is None:
        used = torchcomp.register(model, "mean", scaler=scaler)
    else:
        used = JointSpar(model, budget=1.0, scaler=scaler, **options)
    with used:
        for step in range(4):
            model.zero_grad()
            loss = scaler.scale(loss_of(model(rows(step, torch.float32))))
            with counted() as counts:
                loss.backward()
    return counts


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_waits_for_the_decision_and_for_all_norms_together(name):
    waits = with_fake_ranks(2, backward_pass, OPTIONS[name]).waits
    # The scaler's flag is one more. With per-rank selection, the host also reads which layers the
    # other ranks keep, by two calls.
    assert waits.total() <= (5 if name == "per-rank" else 3)


def test_norms_take_launches_that_do_not_grow_with_the_model():
    def grown(options):
        few, many = (with_fake_ranks(2, backward_pass, options, n) for n in (2, 9))
        return many.launches.total() - few.launches.total()

    assert grown({}) <= grown(None)


# --- LARS -----------------------------------------------------------------------------------------


class Half:
    """Samples every parameter with probability 1/2."""

    def probability(self, parameter):
        return 0.5

    def norm(self, parameter):
        return 2.0


@pytest.mark.parametrize("sampled", [None, Half()], ids=["dense", "sampled"])
@pytest.mark.parametrize("exclude", [False, True])
def test_lars_waits_for_nothing_and_launches_equally_much_for_any_number_of_tensors(
    sampled, exclude
):
    found = []
    for tensors in (2, 9):
        module = deep(tensors)
        optimizer = LARS(
            module.parameters(), 0.1, weight_decay=0.1, exclude_vectors=exclude, sampled=sampled
        )
        for _ in range(2):
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            with counted() as counts:
                optimizer.step()
        assert not counts.waits
        found.append(counts.launches.total())
    assert found[1] <= found[0]
