"""Error feedback over DDP, compared with a serial loop in float64 written from the paper."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torchcomp
from tests.support.models import (
    SMALL_BUCKETS,
    Account,
    Gradients,
    gradients,
    kept,
    local_gradients,
    mlp,
    rows,
    weights,
    wrap,
)
from tests.support.ranks import on_threads
from torchcomp.bucket import partition
from torchcomp.keys import Key

STEPS = 6
SEED = 11

Select = Callable[[Tensor, int, str], Tensor]
"""(vector, step, name of the vector's first parameter) -> vector that is sent."""


def top(share: float) -> Select:
    def select(x: Tensor, step: int, first: str) -> Tensor:
        kept = sorted(range(len(x)), key=lambda i: (-abs(float(x[i])), i))
        sent = torch.zeros_like(x)
        for i in kept[: count(share, len(x))]:
            sent[i] = x[i]
        return sent

    return select


def random(share: float) -> Select:
    def select(x: Tensor, step: int, first: str) -> Tensor:
        generator = Key(SEED, step).of_tensor(first).shared()
        kept = generator.choice(len(x), count(share, len(x)), replace=False, shuffle=False)
        sent = torch.zeros_like(x)
        sent[torch.from_numpy(kept)] = x[torch.from_numpy(kept)]
        return sent

    return select


def count(share: float, numel: int) -> int:
    """Return the number of entries to keep, rounded up. All shares here are exact floats."""
    return int(-(-share * numel // 1))


def rounded(x: Tensor, step: int, first: str) -> Tensor:
    return x.to(torch.bfloat16).double()


def groups_of(scope: str) -> list[tuple[str, ...]]:
    named = list(mlp().named_parameters())
    if scope == "tensor":
        return [(name,) for name, _ in named]
    cap = int(SMALL_BUCKETS * 2**20)
    groups = partition(named, (cap,))
    assert len(groups) > 2
    return list(groups)


def reference(dense: list[list[Gradients]], select: Select, scope: str) -> tuple[list, list]:
    """Error feedback, Seide et al. 2014, one group after another.

    Args:
        dense: gradients by rank and step.
        select: the compressor.
        scope: "bucket" or "tensor"; which parameters are compressed together.

    Returns:
        The mean of every step, and the residual of every rank at the end.
    """
    ranks = range(len(dense))
    residuals = [{name: torch.zeros_like(g) for name, g in dense[0][0].items()} for _ in ranks]
    means = [{} for _ in range(STEPS)]
    for step in range(STEPS):
        for group in groups_of(scope):
            sizes = [dense[0][0][name].numel() for name in group]
            total = torch.zeros(sum(sizes), dtype=torch.float64)
            for rank in ranks:
                gradient, e = dense[rank][step], residuals[rank]
                x = torch.cat([(gradient[name] + e[name]).flatten() for name in group])
                sent = select(x, step, group[0])
                total += sent
                for name, unsent in zip(group, (x - sent).split(sizes), strict=True):
                    e[name] = unsent.view_as(e[name])
            for name, mean in zip(group, (total / len(dense)).split(sizes), strict=True):
                means[step][name] = mean.view_as(residuals[0][name])
    return means, residuals


def trained(spec: str) -> tuple[list[Gradients], list[Gradients], Gradients]:
    """Return own gradients and applied means of every step, and the residual at the end."""
    model = wrap(mlp())
    handle = torchcomp.register(model, spec, seed=SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    own, applied = [], []
    for step in range(STEPS):
        own.append(local_gradients(model.module, (rows(step),)))
        Account().step(model, (rows(step),))
        applied.append(gradients(model))
        optimizer.step()
    assert not torch.equal(weights(model.module), weights(mlp()))
    return own, applied, kept(handle.state_dict())


def compare(spec: str, select: Select, scope: str, world_size: int, tolerance: float) -> None:
    own, applied, residuals = zip(*on_threads(world_size, trained, spec), strict=True)
    means, expected = reference(list(own), select, scope)
    for rank in range(world_size):
        for name in means[0]:
            for step in range(STEPS):
                close(applied[rank][step][name], means[step][name], tolerance)
            close(residuals[rank][name], expected[rank][name], tolerance)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("scope", ["bucket", "tensor"])
def test_topk_is_bit_equal_to_the_reference(scope: str, world_size: int) -> None:
    compare(f'ef(topk(0.125, scope="{scope}"))', top(0.125), scope, world_size, 0.0)


@pytest.mark.parametrize("exchange", ["sum", "gather"])
@pytest.mark.parametrize("scope", ["bucket", "tensor"])
def test_randk_equals_the_reference(scope: str, exchange: str) -> None:
    spec = f'ef(randk(0.25, scope="{scope}"), exchange="{exchange}")'
    # An all-reduce divides before it adds. The reference divides after it.
    compare(spec, random(0.25), scope, 3, 0.0 if exchange == "gather" else 1e-12)


def test_gathered_cast_is_bit_equal_to_the_reference() -> None:
    compare('ef(cast("bf16"), exchange="gather")', rounded, "bucket", 3, 0.0)


def test_seed_selects_the_entries_of_randk() -> None:
    """Otherwise, the comparison above would also pass with another seed."""

    def body(seed: int) -> Tensor:
        model = wrap(mlp())
        torchcomp.register(model, "randk(0.25)", seed=seed)
        Account().step(model, (rows(0),))
        return gradients(model)["0.weight"]

    assert not torch.equal(on_threads(1, body, 1)[0], on_threads(1, body, 2)[0])
