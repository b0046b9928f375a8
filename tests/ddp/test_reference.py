"""Error feedback and bidirectional, compared with serial loops written from their papers."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import torchcomp
from tests.ddp.runs import Run
from tests.support.cases import thorough
from tests.support.models import (
    SMALL_BUCKETS,
    Gradients,
    gradients,
    kept,
    local_gradients,
    loss_of,
    mlp,
    rows,
    weights,
    wrap,
)
from tests.support.outcomes import flat, same
from tests.support.ranks import on_threads
from torchcomp.engine.bucket import partition
from torchcomp.reference import bidirectional, error_feedback, top, top_share

Groups = list[tuple[str, ...]]

# --- Error feedback through DDP -------------------------------------------------------------------


def groups_of(scope: str) -> Groups:
    named = list(mlp().named_parameters())
    if scope == "tensor":
        return [(name,) for name, _ in named]
    return list(partition(named, (int(SMALL_BUCKETS * 2**20),)))


def together(named: Gradients, groups: Groups) -> Gradients:
    """One vector for each group, by the name of its first parameter."""
    return {group[0]: flat(named[name] for name in group) for group in groups}


def trained(spec: str) -> tuple[list[Gradients], list[Gradients], Gradients]:
    """Return own gradients and applied means of every step, and the residual at the end."""
    run, own, applied = Run(spec), [], []
    for step in range(6):
        own.append(local_gradients(run.model.module, (rows(step),)))
        run.step(step)
        applied.append(gradients(run.model))
    assert not torch.equal(run.weights, weights(mlp()))
    return own, applied, kept(run.state)


@pytest.mark.parametrize("scope", ["bucket", "tensor"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_error_feedback_equals_the_reference(scope: str, world_size: int) -> None:
    spec = f'ef(topk(0.125, scope="{scope}"))'
    own, applied, residuals = zip(*on_threads(world_size, trained, spec), strict=True)
    groups = groups_of(scope)
    assert len(groups) > 2
    history = [[together(g, groups) for g in step] for step in zip(*own, strict=True)]
    means, expected = error_feedback(history, top_share(0.125))
    for rank in range(world_size):
        found = [together(each, groups) for each in (*applied[rank], residuals[rank])]
        assert same(found, [*means, expected[rank]])


# --- Both directions, without DDP -----------------------------------------------------------------

STEPS, SIZES, NAMES = 5, (0, 7, 1, 30, 12), ("empty", "a", "one", "b", "c")


def gradient(step: int, rank: int, dtype: torch.dtype, tied: bool = False) -> Tensor:
    """Return a random gradient. If `tied`, it has few magnitudes, so the order of ties matters."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    if tied:
        return torch.randint(-2, 3, (sum(SIZES),), generator=generator).to(dtype)
    return torch.randn(sum(SIZES), generator=generator, dtype=torch.float64).to(dtype)


def by_vector(cuts: list[int], k: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([top(part, min(k, len(part))) for part in x.split(cuts)])


def assert_equals_one_server(
    spec: str, world_size: int, dtype: torch.dtype, tied: bool, up: Any, down: Any
) -> None:
    """Compare with the downlink messages of the thesis's algorithm, on every rank."""

    def body(exchange: torchcomp.InProcessExchange) -> list[Tensor]:
        by_step = [gradient(step, exchange.rank, dtype, tied) for step in range(STEPS)]
        named = [dict(zip(NAMES, g.split(SIZES), strict=True)) for g in by_step]
        averager = torchcomp.Averager(spec, exchange, named[0], [NAMES])
        for each in named:  # views, so the means are in `by_step`
            averager.average_all(each)
        return by_step

    ranks = range(world_size)
    history = [[{"g": gradient(t, rank, dtype, tied)} for rank in ranks] for t in range(STEPS)]
    expected, *_ = bidirectional(history, lambda x, *_: up(x), lambda x, *_: down(x))
    for means in torchcomp.run_in_process(world_size, body):
        assert all(torch.equal(mean, each["g"]) for mean, each in zip(means, expected, strict=True))


WHOLE = by_vector([sum(SIZES)], 6)
EACH = by_vector(list(SIZES), 3)
EXACT = 'selection="exact"'
FORMS = {
    f"bidirectional(topk(k=6), topk(k=6), {EXACT})": (WHOLE, WHOLE),
    f'bidirectional(topk(k=3, scope="tensor"), topk(k=3, scope="tensor"), {EXACT})': (EACH, EACH),
    f'bidirectional(topk(k=6), topk(k=3, scope="tensor"), {EXACT})': (WHOLE, EACH),
    f"bidirectional(identity, topk(k=6), {EXACT})": (torch.clone, WHOLE),
    f"bidirectional(topk(k=6), identity, {EXACT})": (WHOLE, torch.clone),
    "ef(topk(k=6))": (WHOLE, torch.clone),
    'ef(topk(k=6), exchange="sharded")': (WHOLE, torch.clone),
    'ef(topk(k=3, scope="tensor"), exchange="sharded")': (EACH, torch.clone),
    f"bidirectional(topk(k=1000), topk(k=1000), {EXACT})": (torch.clone, torch.clone),
}


@pytest.mark.parametrize("spec", FORMS)
@pytest.mark.parametrize("world_size", [3, *thorough([1, 2, 5, 7])])
@pytest.mark.parametrize("dtype", [torch.float32, *thorough([torch.float64])], ids=str)
@pytest.mark.parametrize("tied", [True, *thorough([False])], ids=["tied", "distinct"])
def test_equals_one_server_bit_for_bit(
    spec: str, world_size: int, dtype: torch.dtype, tied: bool
) -> None:
    assert_equals_one_server(spec, world_size, dtype, tied, *FORMS[spec])


@pytest.mark.parametrize("world_size", [2, 7, *thorough([3, 60])])
def test_shards_are_compressed_as_separate_vectors(world_size: int) -> None:
    """On 60 ranks, which are more than there are elements, some shards are empty."""
    cuts = [r * sum(SIZES) // world_size for r in range(world_size + 1)]
    each = by_vector([b - a for a, b in pairwise(cuts)], 2)
    spec = 'bidirectional(topk(k=2), topk(k=2), selection="shard")'
    assert_equals_one_server(spec, world_size, torch.float64, False, each, each)


def test_scope_model_selects_from_all_gradients_together() -> None:
    spec = f'bidirectional(topk(k=9, scope="model"), topk(k=5, scope="model"), {EXACT})'

    def body() -> list[Tensor]:
        model, alone = wrap(mlp()), mlp()
        order = [name for group in groups_of("bucket") for name in group]
        torchcomp.register(model, spec)
        for each in (alone, model):
            loss_of(each(rows(0))).backward()
        return [flat(gradients(each)[name] for name in order) for each in (alone, model)]

    outcomes = on_threads(2, body)
    expected = top((top(outcomes[0][0], 9) + top(outcomes[1][0], 9)) / 2, 5)
    for _, mean in outcomes:
        assert torch.equal(mean, expected)
