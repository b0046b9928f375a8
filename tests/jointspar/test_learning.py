"""The probabilities that JointSpar learns in a run; LARS and compression with it."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.jointspar.script import backward, estimates, layer_of, seen
from tests.support.cases import some, thorough
from tests.support.models import (
    Account,
    assert_conserved,
    assert_residual,
    kept,
    loss_of,
    mlp,
    rows,
    weights,
    wrap,
)
from tests.support.outcomes import assert_replicas_equal
from tests.support.ranks import on_threads
from torchcomp.errors import SpecError
from torchcomp.jointspar import (
    LARS,
    Bandit,
    Baseline,
    JointSpar,
    Literal,
    best_probabilities,
    sample,
)
from torchcomp.jointspar.skip import Clock
from torchcomp.keys import Key


def layer_norms(jointspar, gradients):
    """Return |g_hat| of each layer, or 0 for layers without a gradient."""
    return np.array(
        [
            math.hypot(
                *(0.0 if gradients[n] is None else float(gradients[n].norm()) for n in names)
            )
            for names in jointspar.layers.values()
        ]
    )


@pytest.mark.parametrize("rule", [Baseline(0.03), Literal(1e-6), None])
@pytest.mark.parametrize("warmup", [0, 2])
def test_p_equals_that_of_a_bandit_updated_by_hand_and_sets_are_drawn_from_it(rule, warmup):
    steps = 12

    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.6, p_min=0.1, rule=rule, warmup_steps=warmup, seed=5)
        bandit = Bandit(np.ones(4), 0.6 * 4, 0.1, rule)
        for step in range(steps):
            p = np.ones(4) if step < warmup else bandit.p
            np.testing.assert_allclose(list(jointspar.p.values()), p, rtol=1e-12)
            kept = sample(p, Key(5, step).of_tensor("jointspar"))
            assert jointspar.kept == tuple(
                n for n, k in zip(jointspar.layers, kept, strict=True) if k
            )
            model.zero_grad()
            backward(model, (rows(step),))
            if rule is not None and step >= warmup:
                bandit.update(kept, layer_norms(jointspar, seen(model)) * p)
        assert (np.ptp(bandit.p) > 0.02) == (rule is not None)
        return list(jointspar.p.values())

    outcomes = on_threads(3, body)
    assert all(p == outcomes[0] for p in outcomes)


def test_per_rank_probabilities_are_learned_from_each_ranks_own_norms():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(
            model, budget=0.6, p_min=0.1, selection="per-rank", rule=Baseline(0.03), warmup_steps=0
        )
        for step in range(10):
            model.zero_grad()
            backward(model, (rows(step),))
        return jointspar.p

    first, second = on_threads(2, body)
    assert first != second
    for p in (first, second):
        assert sum(p.values()) == pytest.approx(0.6 * 4)


@pytest.mark.parametrize("costs", ["layers", *thorough(["bytes"])])
def test_on_a_fixed_batch_it_finds_the_best_probabilities(costs):
    def body():
        model = wrap(mlp(width=8))
        jointspar = JointSpar(model, budget=0.4, costs=costs, p_min=0.02, rule=Baseline(0.03))
        batch = rows(0, width=8)
        norms = None
        for step in range(600):
            model.zero_grad()
            loss_of(model(batch)).backward()
            if step == 0:
                norms = layer_norms(jointspar, seen(model))
        sizes = [sum(p.nbytes for p in layer.parameters()) for layer in list(model.module)[::2]]
        prices = np.ones(4) if costs == "layers" else np.array(sizes, dtype=float)
        best = best_probabilities(norms, 0.4 * prices.sum(), 0.02, prices)
        p = np.array(list(jointspar.p.values()))
        assert (norms**2 / p).sum() < 1.02 * (norms**2 / best).sum()
        assert jointspar.stats.share == pytest.approx(0.4)

    on_threads(2, body)


def test_time_is_measured_in_the_warm_up_and_averaged_over_ranks(monkeypatch):
    """Every reading advances the clock, by 1 on rank 0 and by 2 on rank 1."""
    ticks = defaultdict(int)

    def now(clock):
        ticks[dist.get_rank()] += dist.get_rank() + 1
        return float(ticks[dist.get_rank()])

    monkeypatch.setattr(Clock, "_now", now)

    def body():
        bias = (True, False, True)
        model = wrap(nn.Sequential(*(nn.Linear(16, 16, bias=b) for b in bias)))
        jointspar = JointSpar(model, budget=0.5, costs="time", warmup_steps=4)
        for step in range(8):
            assert len(jointspar.kept) == 3 or step >= 4
            assert jointspar.stats.share == pytest.approx(1.0 if step < 4 else 0.5)
            model.zero_grad()
            loss_of(model(rows(step, torch.float32))).backward()
        # Three timed steps, with one reading per parameter.
        assert jointspar.state_dict()["jointspar"]["costs"] == [9.0, 4.5, 9.0]
        assert "share of time" in jointspar.table()

    on_threads(2, body)


def test_lars_uses_the_running_norms():
    """On a fixed gradient, the mean update of LARS over many sets is the dense update."""

    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, rule=None, seed=1)
        start = [p.detach().clone() for p in model.parameters()]
        total = torch.zeros_like(weights(model.module))
        dense = None
        draws = 400
        for step in range(draws + 1):
            with torch.no_grad():
                for p, x in zip(model.parameters(), start, strict=True):
                    p.copy_(x)
            optimizer = LARS(
                model.parameters(), 0.1, weight_decay=0.01, trust_coefficient=0.1, sampled=jointspar
            )
            model.zero_grad()
            loss_of(model(rows(0))).backward()
            optimizer.step()
            moved = weights(model.module) - torch.cat([x.flatten() for x in start])
            if step == 0:
                dense = moved
            else:
                total += moved
        error = (total / draws - dense).abs()
        # Each entry is dense / p with probability p = 1/2. Its standard error is |dense|/sqrt(n).
        assert (error <= 4 * dense.abs() / math.sqrt(draws) + 1e-15).all()

    on_threads(2, body)


def test_lars_is_refused_with_per_rank_selection():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, selection="per-rank")
        optimizer = LARS(model.parameters(), 0.1, sampled=jointspar)
        backward(model, (rows(0),))
        with pytest.raises(SpecError, match=r'LARS.*selection="shared"'):
            optimizer.step()

    on_threads(2, body)


@pytest.mark.parametrize(
    "build",
    [
        lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, 0.05, weight_decay=0.1),
    ],
    ids=["SGD", "AdamW"],
)
def test_no_optimizer_changes_a_dropped_layer(build):
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5)
        optimizer = build(model.parameters())
        for step in range(4):
            before = {n: p.detach().clone() for n, p in model.module.named_parameters()}
            kept = jointspar.kept
            optimizer.zero_grad()
            backward(model, (rows(step),))
            optimizer.step()
            for name, p in model.module.named_parameters():
                assert torch.equal(p, before[name]) == (layer_of(jointspar, name) not in kept)
        return weights(model.module)

    assert_replicas_equal(on_threads(2, body))


# --- On top of other methods ----------------------------------------------------------------------

COMPOSED = (
    "ef(topk(0.1))",
    'ef(topk(0.1), exchange="sharded")',
    'ef(topk(k=3, scope="tensor"))',
    "ef(randk(0.1))",
    'ef(topk(0.2, values="int8"))',
    'ef(cast("bf16"), exchange="allgather")',
    'bidirectional(topk(0.2), topk(0.2), selection="exact")',
    'bidirectional(topk(0.2), topk(0.3), selection="shard")',
)


@pytest.mark.parametrize("method", some(COMPOSED, of=2))
@pytest.mark.parametrize("selection", ["shared", "per-rank"])
def test_sums_of_estimates_are_applied_or_in_the_residual(method, selection):
    """Error feedback loses nothing of g_hat. A dropped layer adds 0 and keeps its residual."""

    def body():
        model = wrap(mlp())
        jointspar = JointSpar(
            model, budget=0.5, compress=method, selection=selection, warmup_steps=0
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        account = Account()
        for step in range(7):
            optimizer.zero_grad()
            before = kept(jointspar.state_dict())
            own = estimates(jointspar, model, (rows(step),))
            backward(model, (rows(step),))
            after = kept(jointspar.state_dict())
            applied = seen(model)
            for name, gradient in own.items():
                if applied[name] is None:
                    assert gradient is None
                    assert torch.equal(before[name], after[name])
                add(account.dense, name, gradient)
                add(account.applied, name, applied[name])
            optimizer.step()
        zero = {n: torch.zeros_like(p).double() for n, p in model.module.named_parameters()}
        account.dense = zero | account.dense
        account.applied = zero | account.applied
        return account.close(jointspar._handle), weights(model.module)

    outcomes = on_threads(3, body)
    assert_conserved([account for account, _ in outcomes], tolerance=1e-10)
    assert_residual([account for account, _ in outcomes])
    assert_replicas_equal([trained for _, trained in outcomes])


def add(total, name, gradient):
    if gradient is not None:
        total[name] = total[name] + gradient.double() if name in total else gradient.double()


def test_a_compressor_over_the_whole_model_is_refused():
    def body():
        with pytest.raises(SpecError, match=r"scope=\"model\".*scope=\"bucket\""):
            JointSpar(wrap(mlp()), budget=0.5, compress='ef(topk(0.1, scope="model"))')

    on_threads(2, body)
