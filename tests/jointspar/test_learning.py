"""The probabilities that JointSpar learns in a run; LARS and compression with it."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.jointspar.script import backward, estimates, keep, seen
from tests.support.cases import some
from tests.support.models import (
    Account,
    assert_conserved,
    assert_residual,
    kept,
    local_gradients,
    mlp,
    rows,
    weights,
    wrap,
)
from tests.support.outcomes import assert_replicas_equal
from tests.support.ranks import on_threads
from torchcomp import reference
from torchcomp.engine.keys import Key
from torchcomp.jointspar import Baseline, JointSpar, Literal

SIZES = [4 * 272 * 2, 4 * 272 * 2, 4 * 272 * 2, 4 * 68 * 2]


def by_layer(jointspar, gradients) -> list[Tensor | None]:
    """One vector for each layer, or None."""
    groups = [[gradients[name] for name in names] for names in jointspar.layers.values()]
    return [None if g[0] is None else torch.cat([x.flatten() for x in g]) for g in groups]


BY_BYTES = partial(reference.baseline, 0.03, 0.6 * sum(SIZES), 0.1, SIZES)
RULES = {
    "baseline": ("layers", Baseline(0.03), partial(reference.baseline, 0.03, 2.4, 0.1, [1.0] * 4)),
    "bytes": ("bytes", Baseline(0.03), BY_BYTES),
    "literal": ("layers", Literal(1e-6), partial(reference.literal, 1e-6, 2.4, 0.1)),
    "bound": ("layers", Literal(1e-6, 1.0), partial(reference.literal, 1e-6, 2.4, 0.1, 1.0)),
    "uniform": ("layers", None, lambda: None),
}


@pytest.mark.parametrize(("costs", "rule", "update"), RULES.values(), ids=RULES)
def test_equals_the_reference(costs, rule, update):
    steps = 12

    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.6, costs=costs, p_min=0.1, rule=rule, seed=5)
        dense, found, p = [], [], []
        for step in range(steps):
            p.append(list(jointspar.p.values()))
            dense.append(by_layer(jointspar, local_gradients(model, (rows(step),))))
            model.zero_grad()
            backward(model, (rows(step),))
            found.append(by_layer(jointspar, seen(model)))
        return dense, found, p

    outcomes = on_threads(3, body)
    history = [[dense[step] for dense, *_ in outcomes] for step in range(steps)]
    coins = [Key(5, step).of_tensor("jointspar").shared().random(4) for step in range(steps)]
    means, p = reference.jointspar(history, coins, [0.6] * 4, update())
    assert (np.ptp(p[-1]) > 0.02) == (rule is not None)
    for _, found, drawn in outcomes:
        np.testing.assert_allclose(drawn, p, rtol=1e-9)
        for mine, wanted in zip(found, means, strict=True):
            assert [g is None for g in mine] == [g is None for g in wanted]
            for g, mean in zip(mine, wanted, strict=True):
                if g is not None:
                    torch.testing.assert_close(g, mean, rtol=1e-9, atol=1e-12)


def test_per_rank_probabilities_are_learned_from_each_ranks_own_norms():
    def body():
        model = wrap(mlp())
        options = {"selection": "per-rank", "rule": Baseline(0.03), "p_min": 0.1}
        jointspar = JointSpar(model, budget=0.6, **options)
        update, p = reference.baseline(0.03, 2.4, 0.1, [1.0] * 4), [0.6] * 4
        for step in range(10):
            drawn = jointspar.kept
            dense = by_layer(jointspar, local_gradients(model, (rows(step),)))
            model.zero_grad()
            backward(model, (rows(step),))
            if step:
                norms = [float(g.norm()) for g in dense]
                p = update(p, [layer in drawn for layer in jointspar.layers], norms)
            np.testing.assert_allclose(list(jointspar.p.values()), p, rtol=1e-9)
        return jointspar.p

    first, second = on_threads(2, body)
    assert first != second


def test_lars_reads_the_p_and_the_running_norm_of_the_last_step():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5)
        first, second = (
            float(local_gradients(model, (rows(step),))["2.weight"].norm()) for step in range(2)
        )
        backward(model, (rows(0),))
        keep(jointspar, "2", p=0.25)
        model.zero_grad()
        backward(model, (rows(1),))
        weight = model.module[2].weight
        assert jointspar.probability(weight) == 0.25
        # An average with the weights 0.9 and 1, of the norms of the means before the division.
        assert jointspar.norm(weight) == pytest.approx((0.9 * first + second) / 1.9)
        assert jointspar.probability(torch.nn.Parameter(torch.ones(2))) == 1

    on_threads(1, body)


COMPOSED = (
    "ef(topk(0.1))",
    'ef(topk(0.1), exchange="sharded")',
    'ef(topk(k=3, scope="tensor"))',
    "ef(randk(0.1))",
    'bidirectional(topk(0.2), topk(0.2), selection="exact")',
    'bidirectional(topk(0.2), topk(0.3), selection="shard")',
)


@pytest.mark.parametrize("method", some(COMPOSED, of=2))
@pytest.mark.parametrize("selection", ["shared", "per-rank"])
def test_sums_of_estimates_are_applied_or_in_the_residual(method, selection):
    """Error feedback loses nothing of g_hat. A dropped layer adds 0 and keeps its residual."""

    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, compress=method, selection=selection)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        account = Account()
        zero = {n: torch.zeros_like(p).double() for n, p in model.module.named_parameters()}
        account.dense, account.applied = zero, dict(zero)
        for step in range(8):
            optimizer.zero_grad()
            before = kept(jointspar.state_dict())
            own = estimates(jointspar, model, (rows(step),))
            backward(model, (rows(step),))
            after, applied = kept(jointspar.state_dict()), seen(model)
            for name, gradient in own.items():
                if applied[name] is None:
                    assert gradient is None
                    assert torch.equal(before[name], after[name])
                else:
                    account.applied[name] = account.applied[name] + applied[name]
                if gradient is not None:
                    account.dense[name] = account.dense[name] + gradient
            optimizer.step()
        return account.close(jointspar._handle), weights(model.module)

    outcomes = on_threads(3, body)
    assert_conserved([account for account, _ in outcomes], tolerance=1e-10)
    assert_residual([account for account, _ in outcomes])
    assert_replicas_equal([trained for _, trained in outcomes])
