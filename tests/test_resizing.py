"""Nothing is lost over several changes of the number of ranks: 4, 3, 5, and 4 again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.jointspar.script import estimates
from tests.local_sgd.script import Script, constant, momentum, spied, unsent
from tests.support.cases import thorough
from tests.support.models import (
    Account,
    Gradients,
    _add,
    assert_conserved,
    assert_residual,
    gradients,
    kept,
    local_gradients,
    loss_of,
    mlp,
    rows,
    weights,
    wrap,
)
from tests.support.outcomes import assert_close, equal_on_all, flat
from tests.support.ranks import on_threads
from torchcomp import redistribute, register
from torchcomp.checkpoints.redistribution import gathered
from torchcomp.jointspar import JointSpar
from torchcomp.local_sgd import Nesterov, SlowMo
from torchcomp.local_sgd.outer_steps import OuterStep

SIZES = (4, 3, 5, 4)
STEPS = 6
"""Steps with each number of ranks."""

EXACT = 'bidirectional(topk(0.2), topk(0.2), selection="exact")'
SHARD = 'bidirectional(topk(0.2), topk(0.2), selection="shard")'
TOPK = "ef(topk(0.1))"


def trained(
    spec: str, saved: list[dict[str, Any]], start: int
) -> tuple[Account, dict[str, Any], Tensor]:
    """Take some steps from the states of all ranks; return the sums, this rank's state, weights."""
    model = wrap(mlp())
    spar = spec == "jointspar"
    method = JointSpar(model, budget=0.5, compress=TOPK) if spar else register(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if saved:
        model.module.load_state_dict(saved[0]["model"])
        method.load_gathered(gathered([each["method"] for each in saved]))
    account = Account()
    for step in range(start, start + STEPS):
        optimizer.zero_grad()
        _add(account.dense, own_gradients(method, model, rows(step)))
        loss_of(model(rows(step))).backward()
        _add(account.applied, gradients(model))
        optimizer.step()
    account.close(getattr(method, "_handle", method))
    state = {"model": model.module.state_dict(), "method": method.state_dict()}
    return account, state, weights(model.module)


def own_gradients(method: Any, model: Any, inputs: Tensor) -> Gradients:
    """What this rank adds to the mean. JointSpar adds 0 for the layers that it drops."""
    own = local_gradients(model, (inputs,))
    sampled = estimates(method, model, (inputs,)) if isinstance(method, JointSpar) else own
    return {n: torch.zeros_like(g) if sampled[n] is None else sampled[n] for n, g in own.items()}


def mean(all_ranks: list[Gradients]) -> Gradients:
    return {n: torch.stack([each[n] for each in all_ranks]).mean(0) for n in all_ranks[0]}


@pytest.mark.parametrize("spec", [TOPK, SHARD, *thorough([EXACT]), "powersgd(rank=1)", "jointspar"])
def test_gradients_are_applied_or_in_the_residual(spec: str) -> None:
    total, saved = Account(), list[dict[str, Any]]()
    for phase, size in enumerate(SIZES):
        outcomes = on_threads(size, trained, spec, saved, phase * STEPS)
        accounts, saved, replicas = map(list, zip(*outcomes, strict=True))
        assert equal_on_all(replicas)
        # The residual before this number of ranks must not be negligible either.
        assert_residual(accounts)
        _add(total.dense, mean([account.dense for account in accounts]))
        _add(total.applied, accounts[0].applied)
        total.residual = mean([account.residual for account in accounts])
    assert_conserved([total], tolerance=1e-10)


LR = constant(0)

# With d = -m, the outer steps are u <- momentum u + d. From the sums over all rounds:
OUTER: dict[str, tuple[OuterStep, Callable[[Tensor, Tensor], Tensor]]] = {
    "nesterov": (Nesterov(lr=0.8, momentum=0.6), lambda moved, u: moved / 2 - 0.36 * u),
    "slowmo": (SlowMo(beta=0.6, alpha=0.8), lambda moved, u: moved / 2 - 0.6 * LR * u),
}
"""Outer steps, and the sum of mean pseudo-gradients from the change of the weights and from u."""


def averaged(
    local: dict[str, Any], saved: list[dict[str, Any]], start: int
) -> tuple[Tensor, dict[str, Any], Tensor]:
    """Take some steps; return the sum of this rank's pseudo-gradients, its state and weights."""
    before_average: list[Tensor] = []
    watched = spied(momentum, lambda: before_average.append(flat(script.model.parameters())))
    script = Script("every(3)", len(SIZES) * STEPS, optimizer=watched, local=local)
    if saved:
        states = redistribute([each["sync"] for each in saved], dist.get_world_size())
        rank = dist.get_rank()
        script.load({**saved[rank % len(saved)], "sync": states[rank]})
    shared = script.weights()
    pseudo = torch.zeros_like(shared)
    for step in range(start, start + STEPS):
        script.step(step)
        if script.sync.next_sync is None:
            pseudo += before_average[-1] - shared
            shared = script.weights()
    return pseudo, script.save(), shared


@pytest.mark.parametrize(
    "case",
    [(TOPK, "nesterov"), (SHARD, "slowmo"), *thorough([(EXACT, "nesterov"), (TOPK, "slowmo")])],
)
def test_pseudo_gradients_are_applied_or_in_the_residual(case: tuple[str, str]) -> None:
    compress, outer = case
    step, applied = OUTER[outer]
    local = {"compress": compress, "outer": step}
    total, saved = torch.zeros(()), list[dict[str, Any]]()
    start = on_threads(1, lambda: Script().weights())[0]
    for phase, size in enumerate(SIZES):
        outcomes = on_threads(size, averaged, local, saved, phase * STEPS)
        pseudo, saved, shared = map(list, zip(*outcomes, strict=True))
        assert equal_on_all(shared)
        total = total + torch.stack(pseudo).mean(0)
        states = [each["sync"] for each in saved]
        residual = flat(unsent(states).values())
        assert residual.norm() > 1e-3 * total.norm()
        momenta = kept(states[0], "outer_momentum")
        u = flat(momenta[name] for name in states[0]["parameters"])
        assert_close(applied(shared[0] - start, u) + residual, total)
