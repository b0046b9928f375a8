"""Error feedback over DDP, compared with its paper."""

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
from torchcomp.engine.bucket import partition
from torchcomp.engine.keys import Key
from torchcomp.reference import Compress, error_feedback, top_share

STEPS = 6
SEED = 11


def random(share: float) -> Compress:
    def select(x: Tensor, step: int, first: str) -> Tensor:
        generator = Key(SEED, step).of_tensor(first).shared()
        count = int(-(-share * len(x) // 1))  # rounded up; all shares here are exact floats
        kept = generator.choice(len(x), count, replace=False, shuffle=False)
        sent = torch.zeros_like(x)
        sent[torch.from_numpy(kept)] = x[torch.from_numpy(kept)]
        return sent

    return select


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


def together(named: Gradients, groups: list[tuple[str, ...]]) -> Gradients:
    """One vector for each group, by the name of its first parameter."""
    return {group[0]: torch.cat([named[name].flatten() for name in group]) for group in groups}


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


def compare(spec: str, sent: Compress, scope: str, world_size: int, tolerance: float) -> None:
    own, applied, residuals = zip(*on_threads(world_size, trained, spec), strict=True)
    groups = groups_of(scope)
    history = [[together(g, groups) for g in step] for step in zip(*own, strict=True)]
    means, expected = error_feedback(history, sent)
    for rank in range(world_size):
        for mean, found in zip(means, applied[rank], strict=True):
            close(together(found, groups), mean, tolerance)
        close(together(residuals[rank], groups), expected[rank], tolerance)


def close(actual: Gradients, expected: Gradients, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("scope", ["bucket", "tensor"])
def test_topk_is_bit_equal_to_the_reference(scope: str, world_size: int) -> None:
    compare(f'ef(topk(0.125, scope="{scope}"))', top_share(0.125), scope, world_size, 0.0)


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
