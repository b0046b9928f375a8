"""What JointSpar refuses, on all ranks; NaN, infinities and scalers; closing and lifetime."""

import copy
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchcomp
from tests.jointspar.script import backward, keep, seen
from tests.support.cases import thorough
from tests.support.models import loss_of, mlp, rows, weights, wrap
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


def patterns(**layers):
    return {"layers": layers}


# Options, or what builds the model or runs the passes; the error, the option, and a word in it.
REFUSED = [
    ({"budget": 0.0}, SpecError, "budget", "0.0"),
    ({"budget": "half"}, SpecError, "budget", "'half'"),
    ({"budget": 0.01}, SpecError, "p_min", "0.0125"),
    ({"p_min": 0}, SpecError, "p_min", "0"),
    ({"costs": "time"}, SpecError, "costs", '"bytes"'),
    ({"selection": "own"}, SpecError, "selection", '"per-rank"'),
    ({"rule": "literal"}, SpecError, "rule", "Literal"),
    ({"rule": Literal(1e-3), "costs": "bytes"}, SpecError, "rule", "costs"),
    (lambda: Baseline(alpha=0.0), SpecError, "alpha", "0.0"),
    (lambda: Literal(alpha=1.0, bound=-3.0), SpecError, "bound", "-3.0"),
    ({"seed": -1}, SpecError, None, "-1"),
    ({"scaler": "yes"}, SpecError, None, "str"),
    ({"compress": 'ef(topk(0.1, scope="model"))'}, SpecError, "inner", 'scope="bucket"'),
    ({"compress": "every(4)"}, SpecError, None, "schedule"),
    (patterns(a="7.*", b="*"), SpecError, "layers", "'7.*'"),
    (patterns(a="*", b="0.*"), SpecError, "layers", "'b'"),
    (patterns(a="0.*", b="2.*"), SpecError, "layers", "'4.weight'"),
    (patterns(a=None, b="*"), SpecError, "layers", "None"),
    ({"layers": ["0.*", "*"]}, SpecError, "layers", "'0.*'"),
    (patterns(all="*"), SpecError, "layers", "'all'"),
    # On rank 1 only.
    ([{"budget": 0.6}], MISMATCH, None, "budget=0.6"),
    ([{"seed": 1}], MISMATCH, None, "seed"),
    ([{"budget": 2.0}], MISMATCH, None, "2.0"),
    ([patterns(a="[0-2].*", b="*")], MISMATCH, None, "'a'"),
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
    (after(hidden_loss, Detached), UNSUPPORTED, None, "dataclasses"),
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


def test_with_a_scaler_all_ranks_skip_the_step_and_reuse_the_set():
    def body():
        model = wrap(mlp(torch.float32))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        jointspar = JointSpar(model, budget=0.5, scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(6):
            if step == 2:
                keep(jointspar, "2", "4")
            before = weights(model.module), jointspar.kept, jointspar.p
            factor = torch.inf if step == 2 and dist.get_rank() == 1 else 1.0
            optimizer.zero_grad()
            scaler.scale(factor * loss_of(model(rows(step, torch.float32)))).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == 2:
                assert torch.equal(weights(model.module), before[0])
                assert (jointspar.kept, jointspar.p) == before[1:]
                assert scaler.get_scale() == 512.0
        assert jointspar.stats.steps == 5
        return jointspar.p

    first, second = on_threads(2, body)
    assert first == second


@pytest.mark.parametrize("unscaled", [False, True])
def test_with_a_scaler_all_layers_of_an_optimizer_can_be_dropped(unscaled):
    def body():
        model = wrap(mlp(torch.float32))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        jointspar = JointSpar(model, budget=0.5, scaler=scaler)
        parts = model.module[:4], model.module[4:]
        optimizers = [torch.optim.AdamW(part.parameters(), weight_decay=0.1) for part in parts]
        for step, kept in enumerate((("0", "4"), ("0",), ())):
            keep(jointspar, *kept)
            before = [weights(part) for part in parts]
            model.zero_grad()
            scaler.scale(loss_of(model(rows(step, torch.float32)))).backward()
            for optimizer in optimizers:
                if unscaled:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
            scaler.update()
            moved = [not torch.equal(weights(p), b) for p, b in zip(parts, before, strict=True)]
            assert moved == ["0" in kept, "4" in kept]
        # The scaler counts the empty steps as steps without infinities.
        assert scaler.get_scale() == 2048.0
        for copied in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
            copied.scale(torch.ones(()))
            copied.step(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))

    on_threads(2, body)


def test_the_scale_does_not_reach_the_probabilities():
    def body(scale):
        model = wrap(mlp())
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        jointspar = JointSpar(model, budget=0.5, scaler=scaler, rule=Literal(1e-6))
        for step in range(3):
            scaler.scale(loss_of(model(rows(step)))).backward()
        return jointspar.p

    assert on_threads(2, partial(body, 1.0)) == on_threads(2, partial(body, 4096.0))


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
            held, handle = jointspar(), weakref.ref(jointspar()._handle)
            weights_of = weakref.ref(model.module)
            model = None
            # A user's reference stays readable without the model.
            assert held.stats.steps == 1
            assert "0 of 4" in repr(held)
            held = None
            assert (jointspar(), handle(), weights_of()) == (None, None, None)
        finally:
            gc.enable()

    on_threads(1, body)
