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
from tests.support.models import Branches, loss_of, mlp, rows, seeded, weights, wrap
from tests.support.outcomes import assert_refused
from tests.support.ranks import on_threads
from torchcomp.jointspar import JointSpar, Literal
from torchcomp.specs.errors import (
    NonFiniteError,
    RankMismatchError,
    SpecError,
    UnsupportedModelError,
)

# --- One table of refusals ------------------------------------------------------------------------

OPTIONS = [
    ({"budget": 0.0}, "budget", "0.0"),
    ({"budget": 27}, "budget", "27"),
    ({"budget": "half"}, "budget", "'half'"),
    ({"budget": 0.01}, "p_min", "0.0125"),
    ({"p_min": 0}, "p_min", "0"),
    ({"costs": "time"}, "costs", '"bytes"'),
    ({"selection": "own"}, "selection", '"per-rank"'),
    ({"rule": "literal"}, "rule", "Literal"),
    ({"rule": Literal(1e-3), "costs": "bytes"}, "rule", "costs"),
    ({"seed": -1}, None, "-1"),
    ({"scaler": "yes"}, None, "str"),
    ({"compress": 'ef(topk(0.1, scope="model"))'}, "inner", 'scope="bucket"'),
    ({"compress": "ef(topkk(0.1))"}, None, "'topk'"),
    ({"compress": "every(4)"}, None, "schedule"),
    ({"layers": {"a": "7.*", "b": "*"}}, "layers", "'7.*'"),
    ({"layers": {"a": "*", "b": "0.*"}}, "layers", "'b'"),
    ({"layers": {"a": "0.*", "b": "2.*"}}, "layers", "'4.weight'"),
    ({"layers": {"a": [], "b": "*"}}, "layers", "'a'"),
    ({"layers": {"a": None, "b": "*"}}, "layers", "None"),
    ({"layers": {0: "0.*", 1: "*"}}, "layers", "0"),
    ({"layers": ["0.*", "*"]}, "layers", "'0.*'"),
    ({"layers": {"all": "*"}}, "layers", "'all'"),
]


@pytest.mark.parametrize(("options", "field", "word"), OPTIONS)
def test_options(options, field, word):
    def body():
        model = wrap(mlp())
        try:
            JointSpar(model, **{"budget": 0.5, **options})
        finally:
            # Nothing was installed, so another method can be.
            torchcomp.register(model, "mean")

    assert_refused(2, body, SpecError, word, field=field)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, {"budget": 0.6}, ("budget=0.5", "budget=0.6")),
        ({"seed": 0}, {"seed": 1}, ("seed",)),
        ({}, {"budget": 2.0}, ("none", "2.0")),
        ({}, {"layers": {"a": "[0-2].*", "b": "*"}}, ("layers", "'a'")),
    ],
)
def test_arguments_that_differ_across_ranks(first, second, words):
    def body():
        JointSpar(wrap(mlp()), **{"budget": 0.5, **(second if dist.get_rank() else first)})

    assert_refused(2, body, RankMismatchError, *words, "rank 0", "rank 1")


def after_another(method):
    model = wrap(mlp())
    method(model)
    return model


def local_steps(model):
    torchcomp.LocalSGD(model, torch.optim.SGD(model.parameters(), 0.1), "every(2)", total_steps=4)


MODELS = {
    "no DDP": (mlp, UnsupportedModelError, "DistributedDataParallel"),
    "static_graph": (lambda: wrap(mlp(), static_graph=True), UnsupportedModelError, "static_graph"),
    "one layer": (lambda: wrap(nn.Linear(16, 4)), SpecError, "(model)"),
    "JointSpar": (
        lambda: after_another(lambda model: JointSpar(model, budget=0.25)),
        UnsupportedModelError,
        "torchcomp.JointSpar(budget=0.25)",
    ),
    "LocalSGD": (lambda: after_another(local_steps), UnsupportedModelError, "torchcomp.LocalSGD"),
    "and others after it": (
        lambda: local_steps(after_another(lambda model: JointSpar(model, budget=0.25))),
        UnsupportedModelError,
        "torchcomp.JointSpar(budget=0.25)",
    ),
    "a backward pass": (
        lambda: after_another(lambda model: backward(model, (rows(0),))),
        UnsupportedModelError,
        "backward",
    ),
}


@pytest.mark.parametrize(("build", "error", "word"), MODELS.values(), ids=MODELS)
def test_models(build, error, word):
    assert_refused(2, lambda: JointSpar(build(), budget=0.5), error, word)


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


def ran(module, passes):
    """Build JointSpar, keep one layer, and run some passes."""
    model = wrap(module)
    with JointSpar(model, budget=0.5) as jointspar:
        passes(model, jointspar)


def old_backward(model, jointspar):
    with model.no_sync():
        old = loss_of(model(rows(0)))
    backward(model, (rows(1),))
    old.backward()


def hidden_loss(model, jointspar):
    model(rows(0))
    model.module.loss.backward()
    with torch.no_grad():
        model(rows(1))
    model(rows(1))


PASSES = {
    "of an earlier step": (mlp, old_backward, "earlier step"),
    "of a loss that is not returned": (lambda: Detached(), hidden_loss, "dataclasses"),
    "without tensors": (Silent, lambda model, _: model(rows(0)), "dict"),
}


@pytest.mark.parametrize(("build", "passes", "word"), PASSES.values(), ids=PASSES)
def test_passes(build, passes, word):
    assert_refused(2, lambda: ran(build(), passes), UnsupportedModelError, word)


def test_a_kept_layer_that_the_forward_pass_does_not_use_is_ddps_own_error():
    def body():
        model = wrap(seeded(Branches().double()))
        with JointSpar(model, budget=0.5) as jointspar:
            keep(jointspar, "stem", "right")
            loss_of(model(rows(0), ("left",))).backward()
            model(rows(0), ("left",))

    assert_refused(2, body, RuntimeError, "find_unused_parameters=True")


# --- NaN and infinities ---------------------------------------------------------------------------


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


# --- Closing, and lifetime ------------------------------------------------------------------------


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
