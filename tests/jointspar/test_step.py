"""Steps under DDP: the mean of g / p for kept layers, None for the others."""

import itertools
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.jointspar.script import assert_mean, backward, estimates, keep, seen
from tests.support.models import (
    Branches,
    Checkpointed,
    OddSizes,
    Tied,
    convolutions,
    images,
    local_gradients,
    loss_of,
    mlp,
    rebuilt_buckets,
    rows,
    seeded,
    weights,
    wrap,
)
from tests.support.outcomes import raised_by
from tests.support.ranks import on_processes, on_threads
from torchcomp.jointspar import JointSpar

STEPS = 6
WAYS = ("shared", "per-rank")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(16, 8)
        self.cell = nn.LSTM(8, 8, batch_first=True)
        self.outward = nn.Linear(8, 4)

    def forward(self, x):
        return self.outward(self.cell(self.inward(x).view(2, 2, 8))[0])


class Attention(nn.Module):
    """MultiheadAttention uses the weight of its projection without calling that module."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        h = self.norm(x.view(1, 4, 16) + self.token)
        return self.head(self.attention(h, h, h)[0])


def normalised() -> nn.Module:
    layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    return seeded(nn.Sequential(*layers, nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 2))).double()


def frozen() -> nn.Module:
    module = mlp()
    module[2].requires_grad_(False)
    return module


def both_branches(step: int) -> Any:
    return rows(step), ("left", "right")


def one_branch(step: int) -> Any:
    return rows(step), (("left",), ("right",))[step % 2]


@dataclass(frozen=True)
class Case:
    """A model, its batches and its DDP options."""

    build: Any
    batch: Any = rows
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "mlp": Case(mlp),
    "one bucket": Case(mlp, options={"bucket_cap_mb": None}),
    "gradients are views of buckets": Case(mlp, options={"gradient_as_bucket_view": True}),
    "unused parameters": Case(
        lambda: seeded(Branches().double()), one_branch, {"find_unused_parameters": True}
    ),
    "find_unused_parameters, none unused": Case(
        lambda: seeded(Branches().double()), both_branches, {"find_unused_parameters": True}
    ),
    "shared weight": Case(lambda: seeded(Tied()).double()),
    "checkpointed": Case(lambda: seeded(Checkpointed(use_reentrant=False)).double()),
    "odd sizes": Case(lambda: seeded(OddSizes()).double()),
    "channels_last": Case(convolutions, images),
    "batch norm": Case(normalised, images),
    "frozen layer": Case(frozen),
    "recurrent": Case(lambda: seeded(Recurrent()).double()),
    "attention": Case(lambda: seeded(Attention()).double()),
}


def stepped(case: Case, selection: str = "shared", accumulate: int = 1):
    """Return each step's gradients and this rank's estimates, while SGD changes the weights."""
    model = wrap(case.build(), **case.options)
    jointspar = JointSpar(model, budget=0.5, selection=selection, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found, own = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [case.batch(accumulate * step + i) for i in range(accumulate)]
        batches = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
        own.append(estimates(jointspar, model, *batches))
        backward(model, *batches)
        found.append(seen(model))
        optimizer.step()
    assert jointspar.stats.step == STEPS
    jointspar.close()
    return found, own


def check(outcomes) -> None:
    for step in range(STEPS):
        assert_mean([found[step] for found, _ in outcomes], [own[step] for _, own in outcomes])


def some_were_dropped(outcomes) -> bool:
    return any(g is None for step in outcomes[0][1] for g in step.values())


@pytest.mark.parametrize("selection", WAYS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kept_layers_have_the_mean_of_g_over_p_and_dropped_ones_none(case, selection):
    outcomes = on_threads(2, stepped, case, selection)
    check(outcomes)
    assert some_were_dropped(outcomes)


@pytest.mark.parametrize("selection", WAYS)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_all_passes_that_no_sync_accumulates_keep_the_same_layers(options, selection):
    outcomes = on_threads(3, stepped, Case(mlp, options=options), selection, 3)
    check(outcomes)
    assert some_were_dropped(outcomes)


def all_ways():
    return [stepped(Case(mlp), how, accumulate) for how in WAYS for accumulate in (1, 2)]


def test_over_gloo():
    for outcomes in zip(*on_processes(2, all_ways), strict=True):
        check(outcomes)
        assert some_were_dropped(outcomes)


# --- Every set, through the rebuild of the buckets ------------------------------------------------


def test_every_set_of_layers_before_and_after_buckets_are_rebuilt():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        layers = list(jointspar.layers)
        sets = [s for size in range(5) for s in itertools.combinations(layers, size)]
        found, own = [], []
        for step, kept in enumerate(sets):
            keep(jointspar, *kept, p=dict(zip(layers, (0.2, 0.5, 0.9, 1.0), strict=True)))
            model.zero_grad()
            own.append(estimates(jointspar, model, (rows(step),)))
            backward(model, (rows(step),))
            found.append(seen(model))
        assert rebuilt_buckets(model) > 2
        jointspar.close()
        return found, own

    outcomes = on_threads(2, body)
    assert len(outcomes[0][0]) == 16
    for step in range(16):
        assert_mean([found[step] for found, _ in outcomes], [own[step] for _, own in outcomes])


def test_an_empty_set_leaves_all_gradients_none_and_sends_nothing():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        keep(jointspar)
        before = weights(model.module)
        backward(model, (rows(0),))
        assert all(gradient is None for gradient in seen(model).values())
        optimizer.step()
        assert torch.equal(weights(model.module), before)
        assert jointspar.stats.bytes_sent == 0
        assert jointspar.stats.kept == ()
        assert jointspar.presence(model.module[0].weight) == 0.5
        backward(model, (rows(1),))

    on_threads(2, body)


def test_skipped_zero_gives_the_optimizer_zeros_instead():
    def body():
        model = wrap(mlp(), find_unused_parameters=dist.get_world_size() == 3)
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0, skipped="zero")
        keep(jointspar, "2")
        backward(model, (rows(0),))
        for name, gradient in seen(model).items():
            assert bool(gradient.any()) == name.startswith("2.")
        dropped = model.module[0].weight
        assert (jointspar.probability(dropped), jointspar.presence(dropped)) == (0.5, 1.0)

    on_threads(2, body)
    on_threads(3, body)


# --- Training loops -------------------------------------------------------------------------------


class Structured(nn.Module):
    """Returns nested tensors, of which one is a constant and some are not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.left, self.right = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        h = torch.tanh(self.stem(x))
        return {"both": (self.left(h), [self.right(h)]), "rows": len(x), "constant": torch.ones(2)}


@pytest.mark.parametrize("kept", [(), ("stem",), ("left",), ("left", "right")])
def test_structured_outputs_keep_their_structure_and_their_constants(kept):
    def body():
        model = wrap(seeded(Structured()).double())
        jointspar = JointSpar(model, budget=0.5)
        for step in range(2):
            model.zero_grad()
            output = model(rows(step))
            assert set(output) == {"both", "rows", "constant"}
            assert not output["constant"].requires_grad
            # Some losses change an output in place.
            output["both"][0].mul_(2.0)
            loss = loss_of(output["both"][0]) + loss_of(output["both"][1][0])
            loss.backward()
            if step:
                for name, gradient in seen(model).items():
                    assert (gradient is not None) == name.startswith(kept), name
            keep(jointspar, *kept)

    on_threads(2, body)


def test_several_forward_passes_before_one_backward_pass():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        found, own = [], []
        for step, kept in enumerate((("0", "4"), (), ("2",))):
            keep(jointspar, *kept)
            model.zero_grad()
            batches = [(rows(2 * step),), (rows(2 * step + 1),)]
            own.append(estimates(jointspar, model, *batches))
            sum(loss_of(model(*batch)) for batch in batches).backward()
            found.append(seen(model))
        assert jointspar.stats.step == 3
        return found, own

    outcomes = on_threads(2, body)
    for step in range(3):
        assert_mean([found[step] for found, _ in outcomes], [own[step] for _, own in outcomes])


def test_an_output_that_the_loss_leaves_out():
    """Every output is tied, so DDP gets the dropped layers whichever output the loss uses."""

    def body():
        model = wrap(seeded(Structured()).double(), find_unused_parameters=True)
        jointspar = JointSpar(model, budget=0.5)
        for step, side in enumerate((0, 1, 1, 0)):
            if step:
                keep(jointspar, "left")
            model.zero_grad()
            left, (right,) = model(rows(step))["both"]
            loss_of((left, right)[side]).backward()
            for name, gradient in seen(model).items():
                used = (
                    ("left." in name)
                    if step
                    else name.startswith(("stem", ("left", "right")[side]))
                )
                if not used:
                    assert gradient is None or not gradient.any(), (step, name)
        assert jointspar.stats.step == 4

    on_threads(2, body)


def test_evaluation_between_steps_changes_nothing():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        keep(jointspar, "2")
        with torch.no_grad():
            assert not model(rows(0)).requires_grad
        with torch.inference_mode():
            model.module(rows(0))
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters())
        backward(model, (rows(0),))
        return seen(model)

    for gradients in on_threads(2, body):
        assert [name for name, g in gradients.items() if g is not None] == ["2.weight", "2.bias"]


def test_a_term_of_the_loss_on_the_weights_is_dropped_with_their_layer():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        keep(jointspar, "2")
        own = estimates(jointspar, model, (rows(0),))
        own["2.weight"] = own["2.weight"] + 2 * model.module[2].weight.detach() / 0.5
        penalty = sum(p.square().sum() for n, p in model.named_parameters() if n.endswith("weight"))
        (loss_of(model(rows(0))) + penalty).backward()
        return seen(model), own

    outcomes = on_threads(2, body)
    assert_mean([found for found, _ in outcomes], [own for _, own in outcomes])


def test_the_module_has_its_own_parameters_between_forward_and_backward():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        keep(jointspar)
        mine = list(model.parameters())
        output = model(rows(0))
        assert all(a is b for a, b in zip(model.parameters(), mine, strict=True))
        loss_of(output).backward()
        assert all(a is b for a, b in zip(model.parameters(), mine, strict=True))

    on_threads(2, body)


def test_a_forward_pass_that_raises_restores_the_parameters():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        keep(jointspar, "2")
        mine = list(model.parameters())
        assert raised_by(lambda: model.module(torch.zeros(3)))
        assert all(a is b for a, b in zip(model.parameters(), mine, strict=True))

    on_threads(1, body)


def test_autocast_gives_the_same_gradients_as_without_jointspar():
    def body():
        model = wrap(mlp(torch.float32))
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        own, found = [], []
        for step in range(4):
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                own.append(estimates(jointspar, model, (rows(step, torch.float32),)))
                loss = loss_of(model(rows(step, torch.float32)))
            loss.backward()
            found.append(seen(model))
        return found, own

    outcomes = on_threads(2, body)
    for step in range(4):
        own = [outcome[1][step] for outcome in outcomes]
        assert_mean([outcome[0][step] for outcome in outcomes], own, tolerance=1e-6)


def test_a_copy_of_the_model_skips_nothing():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        average = torch.optim.swa_utils.AveragedModel(model)
        keep(jointspar)
        loss_of(average.module.module(rows(0))).backward()
        assert all(p.grad is not None for p in average.parameters())
        average.update_parameters(model)
        backward(model, (rows(0),))
        assert all(gradient is None for gradient in seen(model).values())
        # The backward pass of the copy was not counted.
        assert jointspar.stats.step == 1

    on_threads(2, body)


def compiled_model(where, backend):
    """Wrap a compiled module, a module with a compiled part, or a module for a compiled DDP."""
    module = mlp()
    if where == "part":
        module[2] = torch.compile(module[2], backend=backend)
    # The compiler splits the graph at DDP's buckets, and asserts that these have at least 1 MiB.
    wrapped = torch.compile(module, backend=backend) if where == "inside" else module
    model = wrap(wrapped, bucket_cap_mb=None)
    jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
    return module, model, jointspar


def compiled(backend):
    """Return gradients and estimates for more sets of layers than the compiler's limit."""
    outcomes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        for where in ("part", "inside", "around"):
            module, model, jointspar = compiled_model(where, backend)
            run = torch.compile(model, backend=backend) if where == "around" else model
            found, own = [], []
            for step in range(14):
                module.zero_grad()
                kept = jointspar.kept
                p = dict(zip(jointspar.layers, jointspar._sampler.p, strict=True))
                dense = local_gradients(module, (rows(step),))
                names = {n.replace("_orig_mod.", ""): g for n, g in dense.items()}
                own.append(
                    {
                        name: names[name] / float(p[layer]) if layer in kept else None
                        for layer, members in jointspar.layers.items()
                        for name in members
                    }
                )
                loss_of(run(rows(step))).backward()
                found.append(
                    {
                        name.replace("_orig_mod.", ""): parameter.grad
                        for name, parameter in module.named_parameters()
                    }
                )
            outcomes.append((found, own))
    return outcomes


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_models_follow_the_sets(backend):
    for found, own in on_processes(1, compiled, backend)[0]:
        for mine, expected in zip(found, own, strict=True):
            assert_mean([mine], [expected])
