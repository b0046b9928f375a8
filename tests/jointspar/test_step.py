"""Steps under DDP: the mean of g / p for kept layers, None for the others."""

import itertools
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.jointspar.script import assert_mean, backward, estimates, keep, seen
from tests.support.models import (
    Branches,
    Checkpointed,
    OddSizes,
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
from torchcomp.jointspar import LARS, JointSpar

STEPS = 6
WAYS = ("shared", "per-rank")


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


def frozen() -> nn.Module:
    module = mlp()
    module[2].requires_grad_(False)
    return module


def one_branch(step: int) -> Any:
    return rows(step), (("left",), ("right",))[step % 2]


def tied() -> nn.Module:
    module = mlp()
    module[4].weight = module[0].weight
    return module


def branches() -> nn.Module:
    return seeded(Branches().double())


CASES: dict[str, Any] = {
    "mlp": (mlp, rows, {}),
    "one bucket": (mlp, rows, {"bucket_cap_mb": None}),
    "views": (mlp, rows, {"gradient_as_bucket_view": True}),
    "unused parameters": (branches, one_branch, {"find_unused_parameters": True}),
    "shared weight": (tied, rows, {}),
    "checkpointed": (lambda: seeded(Checkpointed(use_reentrant=False)).double(), rows, {}),
    "odd sizes": (lambda: seeded(OddSizes()).double(), rows, {}),
    "channels_last": (convolutions, images, {}),
    "frozen layer": (frozen, rows, {}),
    "attention": (lambda: seeded(Attention()).double(), rows, {}),
}


def stepped(name: str, selection: str = "shared", accumulate: int = 1):
    """Return each step's gradients and this rank's estimates, while SGD changes the weights."""
    build, batch, options = CASES[name]
    model = wrap(build(), **options)
    jointspar = JointSpar(model, budget=0.5, selection=selection, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found, own = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [batch(accumulate * step + i) for i in range(accumulate)]
        batches = [each if isinstance(each, tuple) else (each,) for each in batches]
        own.append(estimates(jointspar, model, *batches))
        backward(model, *batches)
        found.append(seen(model))
        optimizer.step()
    assert jointspar.stats.steps == STEPS
    jointspar.close()
    return found, own


def check(outcomes, tolerance: float = 1e-12) -> None:
    for step in range(len(outcomes[0][0])):
        found, own = ([outcome[i][step] for outcome in outcomes] for i in (0, 1))
        assert_mean(found, own, tolerance)
    assert any(g is None for step in outcomes[0][1] for g in step.values())


@pytest.mark.parametrize("selection", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_kept_layers_have_the_mean_of_g_over_p_and_dropped_ones_none(case, selection):
    # no_sync accumulates two passes, with the same layers.
    accumulate = 2 if case in ("mlp", "views") else 1
    check(on_threads(2, stepped, case, selection, accumulate))


def all_ways():
    return [stepped("mlp", how, accumulate) for how in WAYS for accumulate in (1, 2)]


def test_over_gloo():
    for outcomes in zip(*on_processes(2, all_ways), strict=True):
        check(outcomes)


def taken(sets, p=0.5, together=1):
    """Keep each of these sets in one step, of one backward pass of several forward passes."""
    model = wrap(mlp())
    jointspar = JointSpar(model, budget=0.5)
    found, own = [], []
    for step, kept in enumerate(sets):
        keep(jointspar, *kept, p=p)
        model.zero_grad()
        batches = [(rows(together * step + i),) for i in range(together)]
        own.append(estimates(jointspar, model, *batches))
        sum(loss_of(model(*batch)) for batch in batches).backward()
        found.append(seen(model))
    assert jointspar.stats.steps == len(sets)
    return found, own, rebuilt_buckets(model)


def test_every_set_of_layers_before_and_after_buckets_are_rebuilt():
    sets = [kept for size in range(5) for kept in itertools.combinations("0246", size)]
    p = dict(zip("0246", (0.2, 0.5, 0.9, 1.0), strict=True))
    outcomes = on_threads(2, taken, sets, p)
    assert outcomes[0][2] > 2
    check(outcomes)


def test_several_forward_passes_before_one_backward_pass():
    check(on_threads(2, taken, (("0", "4"), (), ("2",)), 0.5, 2))


@pytest.mark.parametrize("selection", WAYS)
def test_a_term_of_the_loss_on_the_weights_is_dropped_with_their_layer(selection):
    """With separate sets, the term of a rank that drops the layer must not be sent either."""

    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, selection=selection)
        own_layer = "02"[torch.distributed.get_rank()] if selection == "per-rank" else "2"
        keep(jointspar, own_layer)
        own = estimates(jointspar, model, (rows(0),))
        weight = f"{own_layer}.weight"
        own[weight] = own[weight] + 2 * model.module[int(own_layer)].weight.detach() / 0.5
        penalty = sum(p.square().sum() for n, p in model.named_parameters() if n.endswith("weight"))
        (loss_of(model(rows(0))) + penalty).backward()
        return seen(model), own

    outcomes = on_threads(2, body)
    assert_mean([found for found, _ in outcomes], [own for _, own in outcomes])


def test_evaluation_between_steps_and_a_failing_forward_pass_change_nothing():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5)
        keep(jointspar, "2")
        mine = list(model.parameters())
        with torch.no_grad():
            assert not model(rows(0)).requires_grad
        with torch.inference_mode():
            model.module(rows(0))
        assert raised_by(lambda: model.module(torch.zeros(3)))
        assert all(a is b for a, b in zip(model.parameters(), mine, strict=True))
        output = model(rows(0))
        # Between forward and backward as well, the module has its own parameters.
        assert all(a is b for a, b in zip(model.parameters(), mine, strict=True))
        loss_of(output).backward()
        assert all(a is b for a, b in zip(model.parameters(), mine, strict=True))
        return [name for name, g in seen(model).items() if g is not None]

    assert on_threads(2, body) == [["2.weight", "2.bias"]] * 2


def test_a_copy_of_the_model_skips_nothing():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5)
        average = torch.optim.swa_utils.AveragedModel(model)
        keep(jointspar)
        loss_of(average.module.module(rows(0))).backward()
        assert all(p.grad is not None for p in average.parameters())
        average.update_parameters(model)
        backward(model, (rows(0),))
        assert all(gradient is None for gradient in seen(model).values())
        # The backward pass of the copy was not counted.
        assert jointspar.stats.steps == 1

    on_threads(2, body)


def compiled(backend):
    """Return gradients and estimates for more sets of layers than the compiler's limit."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        for inside in (True, False):
            module = mlp()
            # The compiler asserts that DDP's buckets, where it splits the graph, have 1 MiB.
            inner = torch.compile(module, backend=backend) if inside else module
            model = wrap(inner, bucket_cap_mb=None)
            jointspar = JointSpar(model, budget=0.5)
            run = model if inside else torch.compile(model, backend=backend)
            for step in range(14):
                module.zero_grad()
                kept, p = jointspar.kept, jointspar.p
                own = local_gradients(module, (rows(step),))
                of = {n: each for each, names in jointspar.layers.items() for n in names}
                layers = {name: of.get(name) or of[f"_orig_mod.{name}"] for name in own}
                own = {n: g / p[layers[n]] if layers[n] in kept else None for n, g in own.items()}
                loss_of(run(rows(step))).backward()
                found.append(({n: p.grad for n, p in module.named_parameters()}, own))
    return found


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_models_follow_the_sets(backend):
    for found, own in on_processes(1, compiled, backend)[0]:
        assert_mean([found], [own])


def trained_to_the_end(way, lars=False, **options):
    """Return the weights after 6 steps, of which every second one accumulates gradients."""
    model = wrap(mlp(), **options)
    jointspar = JointSpar(model, budget=1.0, selection=way) if way else None
    common = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    optimizer = torch.optim.SGD(model.parameters(), **common)
    if lars:
        optimizer = LARS(model.parameters(), trust_coefficient=0.1, sampled=jointspar, **common)
    for step in range(6):
        optimizer.zero_grad()
        backward(model, *[(rows(100 + step),)] * (step % 2), (rows(step),))
        optimizer.step()
    if way:
        assert jointspar.stats.steps == 6
        assert jointspar.stats.total_bytes_sent == jointspar.stats.total_dense_bytes_sent
    return weights(model.module)


AS_PLAIN = ({"bucket_cap_mb": None}, {"gradient_as_bucket_view": True}, {"lars": True})


@pytest.mark.parametrize("options", AS_PLAIN)
def test_budget_one_trains_as_plain_ddp(options):
    ways = ("shared",) if options.get("lars") else WAYS
    plain, *runs = [on_threads(3, partial(trained_to_the_end, w, **options)) for w in (None, *ways)]
    assert not torch.equal(plain[0], weights(mlp()))
    for found in runs:
        assert all(map(torch.equal, found, plain))
