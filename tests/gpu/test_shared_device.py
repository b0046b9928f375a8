"""Several ranks share one device, over gloo with tensors of the device.

NCCL refuses two ranks on one GPU. gloo runs every method and route there, with real messages of
several ranks.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torchcomp
from tests.gpu.place import REHEARSAL, delayed, on_ranks
from tests.gpu.training import PLAIN, Run, trained
from tests.support.models import CONSERVING, METHODS, THROUGH_DDP, assert_conserved
from tests.support.outcomes import assert_replicas_equal, caught

ALL = THROUGH_DDP if REHEARSAL else METHODS


def every_method(specs: tuple[str, ...]) -> dict[str, Any]:
    """Train with every method; return the weights, and an account if the method conserves."""
    found = {}
    for spec in specs:
        run = Run(spec, dtype=torch.float64 if spec in CONSERVING else torch.float32)
        for step in range(4):
            run.account.step(run.model, (run.rows(step),), optimizer=run.optimizer)
        run.close()
        found[spec] = run.weights(), run.account.close(run.handle)
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_replicas_are_bit_equal_with_every_method_and_route(world_size: int) -> None:
    specs = tuple(dict.fromkeys((*ALL, *CONSERVING)))
    outcomes = on_ranks(world_size, every_method, specs)
    for spec in specs:
        weights, accounts = zip(*(outcome[spec] for outcome in outcomes), strict=True)
        assert_replicas_equal(list(weights))
        if spec in CONSERVING:
            assert_conserved(list(accounts))


def on_two_levels(specs: tuple[str, ...]) -> list[tuple[Tensor, Tensor]]:
    """The weights of nodes of two ranks, and those of a run whose exchange lags behind."""
    found = []
    for spec in specs:
        run, late = Run(spec, nodes=2).train(0, 3), Run(spec, nodes=2)
        with delayed("exchange", late.model):
            late.train(0, 3)
        found.append((run.weights(), late.weights()))
        run.close()
        late.close()
    return found


def test_replicas_of_nodes_are_bit_equal() -> None:
    for runs in zip(*on_ranks(4, on_two_levels, ALL), strict=True):
        assert_replicas_equal([weights for pair in runs for weights in pair])


def nan_on_one_rank(specs: tuple[str, ...]) -> list[tuple[str, bool, Tensor]]:
    """Train through a step with a NaN on rank 1; return its error and what is left."""
    found = []
    for spec in specs:
        run = Run(spec).train(0, 2)
        state = run.residual()
        first = next(run.model.module.parameters())
        spoil = dist.get_rank() == 1
        hook = first.register_hook(lambda g, spoil=spoil: g.fill_(torch.nan) if spoil else g)
        error = caught(lambda run=run: run.backward(2))
        hook.remove()
        unchanged = torch.equal(run.residual(), state)
        run.train(3, 5).close()
        found.append((type(error).__name__, unchanged, run.weights()))
    return found


def test_a_nan_on_one_rank_raises_on_all() -> None:
    for outcomes in zip(*on_ranks(2, nan_on_one_rank, THROUGH_DDP[1:]), strict=True):
        errors, unchanged, weights = zip(*outcomes, strict=True)
        assert errors == (torchcomp.NonFiniteError.__name__,) * 2
        assert all(unchanged)
        assert weights[0].isfinite().all()
        assert_replicas_equal(list(weights))


# --- Local steps and JointSpar --------------------------------------------------------------------


def local_steps(stream: str, **options: Any) -> Tensor:
    """Return the weights after each round of three local steps."""
    run, found = Run(PLAIN), []
    sync = torchcomp.LocalSGD(run.model, run.optimizer, "every(3)", total_steps=9, **options)
    with delayed(stream, run.model):
        for step in range(9):
            run.train(step, step + 1)
            if step % 3 == 2:
                sync.wait()
                found.append(run.weights())
    sync.close()
    return torch.stack(found)


def local_steps_in_all_ways() -> list[Tensor]:
    plain = local_steps("none")
    overlapped = [local_steps(s, overlap=True) for s in ("none", "backward", "exchange")]
    compressed = local_steps("none", compress="ef(topk(0.1))")
    return [plain, *overlapped, compressed]


def test_local_steps_overlap_bit_for_bit() -> None:
    outcomes = on_ranks(2, local_steps_in_all_ways)
    for weights in zip(*outcomes, strict=True):
        assert_replicas_equal(list(weights))
    plain, *overlapped, compressed = outcomes[0]
    for found in overlapped:
        assert torch.equal(found, plain)
    assert not torch.equal(compressed, plain)


def jointspar() -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of plain DDP, of budget 1 and of budget 0.5."""
    found = [trained(PLAIN)]
    for budget in (1.0, 0.5):
        run = Run(PLAIN)
        sampled = torchcomp.JointSpar(run.model, budget=budget)
        run.train(0, 6)
        sampled.close()
        found.append(run.weights())
    return found[0], found[1], found[2]


def test_jointspar_with_budget_one_is_plain_ddp() -> None:
    for weights in zip(*(outcomes := on_ranks(2, jointspar)), strict=True):
        assert_replicas_equal(list(weights))
    plain, whole, half = outcomes[0]
    assert torch.equal(whole, plain)
    assert not torch.equal(half, plain)
