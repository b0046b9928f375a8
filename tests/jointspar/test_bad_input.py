"""What JointSpar refuses, on all ranks; NaN; closing and lifetime."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchcomp
from tests.jointspar.script import backward, keep, seen
from tests.support.cases import thorough
from tests.support.models import loss_of, mlp, rows, wrap
from tests.support.outcomes import assert_refused
from tests.support.ranks import on_threads
from torchcomp.jointspar import Baseline, JointSpar, Literal
from torchcomp.specs.errors import (
    NonFiniteError,
    RankMismatchError,
    SpecError,
    UnsupportedModelError,
)

UNSUPPORTED, MISMATCH = UnsupportedModelError, RankMismatchError


def after(method, build=mlp):
    def make():
        model = wrap(build())
        method(model)
        return model

    return make


def local_steps(model):
    torchcomp.LocalSGD(model, torch.optim.SGD(model.parameters(), 0.1), "every(2)", total_steps=4)


def then_local_steps():
    model = wrap(mlp())
    JointSpar(model, budget=0.25)
    local_steps(model)


class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        self.loss = loss_of(self.layers(x))
        return {"rows": len(x)}


class Detached(Silent):
    def forward(self, x):
        super().forward(x)
        return self.loss.detach()


def old_backward(model):
    with JointSpar(model, budget=0.5):
        with model.no_sync():
            old = loss_of(model(rows(0)))
        backward(model, (rows(1),))
        old.backward()


def hidden_loss(model):
    with JointSpar(model, budget=0.5):
        model(rows(0))
        model.module.loss.backward()
        with torch.no_grad():
            model(rows(1))
        model(rows(1))


def silent(model):
    with JointSpar(model, budget=0.5):
        model(rows(0))


# Options, or what builds the model or runs the passes; the error, the option, and a word in it.
REFUSED = [
    ({"budget": 0.0}, SpecError, "budget", "0.0"),
    ({"budget": 0.01}, SpecError, "p_min", "0.0125"),
    ({"costs": "time"}, SpecError, "costs", '"bytes"'),
    ({"selection": "own"}, SpecError, "selection", '"per-rank"'),
    ({"rule": "literal"}, SpecError, "rule", "Literal"),
    ({"rule": Literal(1e-3), "costs": "bytes"}, SpecError, "rule", "costs"),
    (lambda: Baseline(alpha=0.0), SpecError, "alpha", "0.0"),
    (lambda: Literal(alpha=1.0, bound=-3.0), SpecError, "bound", "-3.0"),
    ({"seed": -1}, SpecError, None, "-1"),
    ({"compress": 'ef(topk(0.1, scope="model"))'}, SpecError, "inner", 'scope="bucket"'),
    ({"compress": "every(4)"}, SpecError, None, "schedule"),
    # On rank 1 only.
    ([{"budget": 0.6}], MISMATCH, None, "budget=0.6"),
    ([{"seed": 1}], MISMATCH, None, "seed"),
    # Models.
    (lambda: JointSpar(mlp(), budget=0.5), UNSUPPORTED, None, "DistributedDataParallel"),
    (lambda: wrap(mlp(), static_graph=True), UNSUPPORTED, None, "static_graph"),
    (lambda: wrap(nn.Linear(16, 4)), SpecError, None, "(model)"),
    (after(lambda model: JointSpar(model, budget=0.25)), UNSUPPORTED, None, "(budget=0.25)"),
    (after(local_steps), UNSUPPORTED, None, "torchcomp.LocalSGD"),
    (then_local_steps, UNSUPPORTED, None, "torchcomp.JointSpar(budget=0.25)"),
    (after(lambda model: backward(model, (rows(0),))), UNSUPPORTED, None, "backward"),
    # Passes.
    (after(old_backward), UNSUPPORTED, None, "earlier step"),
    (after(hidden_loss, Detached), UNSUPPORTED, None, "tuples, lists or dicts"),
    (after(silent, Silent), UNSUPPORTED, None, "dict"),
]


@pytest.mark.parametrize(("case", "error", "field", "word"), REFUSED)
def test_what_is_refused(case, error, field, word):
    def body():
        if callable(case):
            JointSpar(case(), budget=0.5)
        (own,) = case if isinstance(case, list) else (case,)
        changes = own if isinstance(case, dict) or dist.get_rank() else {}
        model = wrap(mlp())
        try:
            JointSpar(model, **{"budget": 0.5, **changes})
        finally:
            # Nothing was installed, so another method can be.
            torchcomp.register(model, "mean")

    assert_refused(2, body, error, word, field=field)


@pytest.mark.parametrize("selection", ["shared", "per-rank"])
@pytest.mark.parametrize("value", [float("nan"), *thorough([float("inf")])])
def test_a_nan_on_one_rank_raises_on_all_ranks_and_does_not_change_p(value, selection):
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, selection=selection)
        for step in range(2):
            model.zero_grad()
            backward(model, (rows(step),))
        keep(jointspar, "2")
        before = copy.deepcopy(jointspar.state_dict()["jointspar"])
        with pytest.raises(NonFiniteError, match=r"'2\.weight'.*rank 1"):
            (loss_of(model(rows(2))) * (value if dist.get_rank() else 1.0)).backward()
        assert jointspar.state_dict()["jointspar"] == before
        assert jointspar.kept == ("2",)
        model.zero_grad()
        backward(model, (rows(3),))
        assert jointspar.stats.steps == 3
        return jointspar.p

    first, second = on_threads(2, body)
    assert (first == second) == (selection == "shared")


def test_close_restores_the_module():
    def body():
        model = wrap(mlp())
        with JointSpar(model, budget=0.5) as jointspar:
            keep(jointspar)
        loss_of(model.module(rows(0))).backward()
        assert all(p.grad is not None for p in model.parameters())
        with pytest.raises(RuntimeError, match="closed"):
            backward(model, (rows(0),))

    on_threads(1, body)


def test_the_model_keeps_jointspar_alive_and_releases_it():
    def body():
        gc.disable()
        try:
            model = wrap(mlp())
            jointspar = weakref.ref(JointSpar(model, budget=0.5))
            keep(jointspar())
            backward(model, (rows(0),))
            assert all(gradient is None for gradient in seen(model).values())
            weights_of, model = weakref.ref(model.module), None
            assert (jointspar(), weights_of()) == (None, None)
        finally:
            gc.enable()

    on_threads(1, body)
