"""Bad options, models and passes are refused on all ranks; NaN, infinities, scalers, close()."""

import copy
import gc
import pickle
import re
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchcomp
from tests.jointspar.script import backward, keep, seen
from tests.support.models import (
    Branches,
    Checkpointed,
    loss_of,
    mlp,
    rows,
    seeded,
    weights,
    wrap,
)
from tests.support.ranks import on_threads
from torchcomp.errors import (
    NonFiniteError,
    RankMismatchError,
    SpecError,
    UnsupportedModelError,
)
from torchcomp.jointspar import JointSpar, Literal

REFUSED = {
    "budget 0": ({"budget": 0.0}, r"budget.* 0\.0$"),
    "budget above 1": ({"budget": 27}, r"budget.* 27$"),
    "budget of text": ({"budget": "half"}, r"budget.*'half'"),
    "infeasible": ({"budget": 0.01}, r"p_min = 0\.0125.*budget = 0\.01"),
    "p_min 0": ({"p_min": 0}, r"p_min.* 0$"),
    "costs": ({"costs": "flops"}, 'costs.*"layers", "bytes", "time".*flops'),
    "selection": ({"selection": "own"}, 'selection.*"shared", "per-rank".*own'),
    "skipped": ({"skipped": "stale"}, 'skipped.*"none", "zero".*stale'),
    "rule": ({"rule": 0.01}, r"rule.*Baseline.*Literal.*None.*float"),
    "rule by name": ({"rule": "literal"}, r"rule.*Baseline.*Literal.*None.*str"),
    "literal with costs": ({"rule": Literal(1e-3), "costs": "bytes"}, "Literal.*costs"),
    "warm-up": ({"warmup_steps": -1}, r"warmup_steps.* 0.* -1$"),
    "warm-up too short to measure": (
        {"warmup_steps": 1, "costs": "time"},
        r'warmup_steps.* 2.*costs="time".* 1$',
    ),
    "seed": ({"seed": -1}, r"seed.*-1"),
    "method": ({"compress": "ef(topkk(0.1))"}, "'topk'"),
    "schedule": ({"compress": "every(4)"}, r"'every\(4\)'.*schedule"),
    "pattern": ({"layers": {"a": "7.*", "b": "*"}}, r"'a'.*'7\.\*'"),
    "in two layers": ({"layers": {"a": "*", "b": "0.*"}}, r"'0\.weight'.* 2 .*'a'.*'b'"),
    "in no layer": ({"layers": {"a": "0.*", "b": "2.*"}}, r"'4\.weight'"),
    "one layer": ({"layers": {"all": "*"}}, r"\b1\b.*'all'"),
    "no pattern": ({"layers": {"a": [], "b": "*"}}, r"'a'.*\[\]"),
    "scaler": ({"scaler": "yes"}, r"scaler.*GradScaler.*str"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_options_are_refused_on_all_ranks(options, message):
    def body():
        model = wrap(mlp())
        with pytest.raises(SpecError, match=message):
            JointSpar(model, **{"budget": 0.5, **options})
        # Nothing was installed, so another method can be.
        torchcomp.register(model, "mean")

    on_threads(2, body)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"budget": 0.5}, {"budget": 0.6}, r"budget=0\.5.*rank 0.*budget=0\.6.*rank 1"),
        ({"seed": 0}, {"seed": 1}, r"seed.*0.*rank 0.*1.*rank 1"),
        ({}, {"budget": 2.0}, r"none.*rank 0.*budget.*2\.0.*rank 1"),
        ({}, {"layers": {"a": "[0-2].*", "b": "[4-6].*"}}, r"layers.*'0'.*rank 0.*'a'.*rank 1"),
        ({}, {"skipped": "zero"}, r"skipped.*none.*rank 0.*zero.*rank 1"),
    ],
)
def test_arguments_that_differ_across_ranks_raise_on_all_ranks(first, second, message):
    def body():
        options = second if dist.get_rank() else first
        with pytest.raises(RankMismatchError, match=message):
            JointSpar(wrap(mlp()), **{"budget": 0.5, **options})

    on_threads(2, body)


@pytest.mark.parametrize(
    ("build", "options", "error", "message"),
    [
        (mlp, {"static_graph": True}, UnsupportedModelError, "static_graph=True"),
        (lambda: nn.Linear(16, 4), {}, SpecError, r"\b1\b.*'\(model\)'"),
    ],
)
def test_models_that_cannot_skip_are_refused(build, options, error, message):
    def body():
        model = wrap(build(), **options)
        with pytest.raises(error, match=message):
            JointSpar(model, budget=0.5)

    on_threads(1, body)


def test_a_model_outside_ddp_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"DistributedDataParallel.*Sequential"):
        JointSpar(mlp(), budget=0.5)


def test_one_method_per_model():
    def body():
        model = wrap(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        JointSpar(model, budget=0.5)
        for again in (
            lambda: JointSpar(model, budget=0.5),
            lambda: torchcomp.register(model, "mean"),
            lambda: torchcomp.LocalSGD(model, optimizer, "every(2)", total_steps=4),
        ):
            with pytest.raises(UnsupportedModelError, match=r"torchcomp\.JointSpar\(budget=0\.5\)"):
                again()
        local = wrap(mlp())
        optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
        torchcomp.LocalSGD(local, optimizer, "every(2)", total_steps=4)
        with pytest.raises(UnsupportedModelError, match=r"torchcomp\.LocalSGD.*JointSpar"):
            JointSpar(local, budget=0.5)

    on_threads(2, body)


def test_after_a_backward_pass_it_is_too_late():
    def body():
        model = wrap(mlp())
        backward(model, (rows(0),))
        message = r"backward.*DistributedDataParallel\(\.\.\.\)"
        with pytest.raises(UnsupportedModelError, match=message):
            JointSpar(model, budget=0.5)

    on_threads(2, body)


# --- Forward passes that JointSpar refuses --------------------------------------------------------


def test_a_kept_layer_that_the_forward_pass_does_not_use():
    def body():
        model = wrap(seeded(Branches().double()))
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        keep(jointspar, "stem", "right")
        with pytest.raises(UnsupportedModelError, match=r"'right\.weight'.*\b2\b.*unused"):
            loss_of(model(rows(0), ("left",))).backward()

    on_threads(2, body)


def test_a_dropped_layer_need_not_be_used():
    def body():
        model = wrap(seeded(Branches().double()))
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        for step in range(3):
            keep(jointspar, "left")
            model.zero_grad()
            loss_of(model(rows(step), ("left",))).backward()
            assert [n for n, g in seen(model).items() if g is not None] == [
                "left.weight",
                "left.bias",
            ]

    on_threads(2, body)


def test_reentrant_checkpointing_behind_a_dropped_prefix_is_named():
    def body():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of inputs that require no gradient
            model = wrap(seeded(Checkpointed(use_reentrant=True).double()))
            jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
            keep(jointspar, "blocks.1.0")
            with pytest.raises(UnsupportedModelError, match="use_reentrant=False"):
                loss_of(model(rows(0))).backward()

    on_threads(1, body)


def test_a_backward_pass_of_an_earlier_step_is_refused():
    def body():
        model = wrap(mlp())
        JointSpar(model, budget=0.5)
        with model.no_sync():
            old = loss_of(model(rows(0)))
        backward(model, (rows(1),))
        with pytest.raises(UnsupportedModelError, match=r"backward.*earlier step"):
            old.backward()

    on_threads(1, body)


def test_an_output_without_tensors_is_refused():
    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, x):
            return {"rows": len(x)}

    def body():
        model = wrap(Silent())
        JointSpar(model, budget=0.5)
        with pytest.raises(UnsupportedModelError, match=r"\bdict\b"):
            model(rows(0))

    on_threads(1, body)


# --- NaN and infinities ---------------------------------------------------------------------------


@pytest.mark.parametrize("selection", ["shared", "per-rank"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nan_on_one_rank_raises_on_all_ranks_and_does_not_change_p(value, selection):
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, selection=selection)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(2):
            optimizer.zero_grad()
            backward(model, (rows(step),))
            optimizer.step()
        keep(jointspar, "2")
        before = copy.deepcopy(jointspar.state_dict()["jointspar"])
        with pytest.raises(NonFiniteError, match=r"'2\.weight'.*rank 1"):
            (loss_of(model(rows(2))) * (value if dist.get_rank() else 1.0)).backward()
        assert jointspar.state_dict()["jointspar"] == before
        assert jointspar.kept == ("2",)
        optimizer.zero_grad()
        backward(model, (rows(3),))
        assert jointspar.stats.step == 3
        return jointspar.p

    first, second = on_threads(2, body)
    assert (first == second) == (selection == "shared")


def test_with_a_scaler_all_ranks_skip_the_step_and_reuse_the_set():
    def body():
        model = wrap(mlp(torch.float32))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        jointspar = JointSpar(model, budget=0.5, scaler=scaler, warmup_steps=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(6):
            before, kept = weights(model.module), jointspar.kept
            if step == 2:
                keep(jointspar, "2", "4")
                kept = jointspar.kept
            factor = torch.inf if step == 2 and dist.get_rank() == 1 else 1.0
            optimizer.zero_grad()
            scaler.scale(factor * loss_of(model(rows(step, torch.float32)))).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == 2:
                assert jointspar.kept == kept
                assert torch.equal(weights(model.module), before)
                assert scaler.get_scale() == 512.0
        assert jointspar.stats.step == 5
        return jointspar.p

    first, second = on_threads(2, body)
    assert first == second


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("unscaled", [False, True])
def test_with_a_scaler_all_layers_of_an_optimizer_can_be_dropped(optimizer, unscaled):
    def body():
        model = wrap(mlp(torch.float32))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        jointspar = JointSpar(model, budget=0.5, scaler=scaler, warmup_steps=0)
        body_of, head_of = (
            optimizer(part.parameters(), lr=0.1, weight_decay=0.1)
            for part in (model.module[:4], model.module[4:])
        )
        for step, kept in enumerate((("0", "4"), ("0",), ())):
            keep(jointspar, *kept)
            before = [weights(part) for part in (model.module[:4], model.module[4:])]
            model.zero_grad()
            scaler.scale(loss_of(model(rows(step, torch.float32)))).backward()
            for part in (body_of, head_of):
                if unscaled:
                    scaler.unscale_(part)
                scaler.step(part)
            scaler.update()
            after = [weights(part) for part in (model.module[:4], model.module[4:])]
            moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
            assert moved == ["0" in kept, "4" in kept]
        # The scaler counts the empty steps as steps without infinities.
        assert scaler.get_scale() == 2048.0

    on_threads(2, body)


def test_a_scaler_can_still_be_copied_and_pickled():
    def body():
        scaler = torch.amp.GradScaler("cpu")
        JointSpar(wrap(mlp()), budget=0.5, scaler=scaler)
        for copied in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
            copied.scale(torch.ones(()))
            copied.step(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
            copied.update()

    on_threads(1, body)


def test_the_scale_does_not_reach_the_probabilities():
    def body(scale):
        model = wrap(mlp())
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        jointspar = JointSpar(model, budget=0.5, scaler=scaler, rule=Literal(1e-6), warmup_steps=0)
        for step in range(5):
            model.zero_grad()
            scaler.scale(loss_of(model(rows(step)))).backward()
        return jointspar.p

    assert on_threads(2, body, 1.0) == on_threads(2, body, 4096.0)


# --- Closing, and lifetime ------------------------------------------------------------------------


def test_close_restores_the_module():
    def body():
        model = wrap(mlp())
        with JointSpar(model, budget=0.5, warmup_steps=0) as jointspar:
            keep(jointspar)
        output = model.module(rows(0))
        loss_of(output).backward()
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()
        with pytest.raises(RuntimeError, match="closed"):
            backward(model, (rows(0),))

    on_threads(1, body)


def test_the_model_keeps_jointspar_alive_and_releases_it():
    def body():
        gc.disable()
        try:
            model = wrap(mlp())
            jointspar = weakref.ref(JointSpar(model, budget=0.5, warmup_steps=0))
            keep(jointspar())
            backward(model, (rows(0),))
            assert all(gradient is None for gradient in seen(model).values())
            held, handle = jointspar(), weakref.ref(jointspar()._handle)
            weights_of = weakref.ref(model.module)
            model = None
            # A user's reference stays readable without the model.
            assert held.stats.step == 1
            assert re.search(r"\b1\b.*\b0\b.*\b4\b", repr(held))
            held = None
            assert (jointspar(), handle(), weights_of()) == (None, None, None)
        finally:
            gc.enable()

    on_threads(1, body)
