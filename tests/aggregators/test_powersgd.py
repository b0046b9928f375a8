"""PowerSGD compared with its paper, and for matrices that are hard to orthonormalize."""

from typing import Any

import pytest
import torch

from tests.aggregators.runs import (
    ONE,
    SEVERAL,
    SHAPES,
    Named,
    assert_near,
    averager,
    first_q,
    gradient,
    history,
    mean,
    on_ranks,
    parameters,
    step,
    steps,
    total,
)
from tests.support.cases import thorough
from tests.support.models import kept
from torchcomp.aggregators import PowerSGD
from torchcomp.engine.bucket import BucketShape
from torchcomp.reference import compresses, powersgd

STEPS = 30


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("groups", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("rank", [2, *thorough([1, 4])])
def test_equals_the_paper(rank: int, groups: tuple[tuple[str, ...], ...], world_size: int) -> None:
    def body(exchange: Any) -> tuple[list[Named], Named]:
        engine = averager(f"powersgd({rank})", exchange, groups)
        return steps(engine, range(STEPS), groups), kept(engine.state_dict(), "error")

    means, residuals = powersgd(history(STEPS, world_size), rank, first_q)
    for worker, (applied, residual) in enumerate(on_ranks(world_size, body)):
        for actual, expected in zip(applied, means, strict=True):
            assert_near(actual, expected, 1e-9)
        assert_near(residual, residuals[worker], 1e-9)


def test_both_definitions_of_the_residual_apply_the_same_means() -> None:
    """The residuals of the ranks differ. With M - P Q^T, they grow without bound."""
    gradients = history(STEPS, 4)
    means, own = powersgd(gradients, 2, first_q)
    others, shared = powersgd(gradients, 2, first_q, residual="mean")
    for one, other in zip(means, others, strict=True):
        assert_near(one, other, 1e-9)
    assert_near(mean(own), mean(shared), 1e-9)
    assert total(shared)["conv"].norm() < sum(e["conv"].norm() for e in shared)
    assert sum(e["conv"].norm() for e in own) < sum(e["conv"].norm() for e in shared)


@pytest.mark.parametrize(
    ("dtype", "option", "tolerance"),
    [
        (torch.float64, "", 1e-12),
        (torch.float32, "", 1e-4),
        (torch.bfloat16, "", 1e-4),
        (torch.float16, ', memory_dtype="fp64"', 1e-4),
        (torch.float32, ', memory_dtype="bf16"', 1.0),
    ],
)
def test_nothing_is_lost(dtype: torch.dtype, option: str, tolerance: float) -> None:
    def body(exchange: Any) -> tuple[Named, Named, Named]:
        engine = averager(f"powersgd(2{option})", exchange, SEVERAL, dtype)
        applied = [double(each) for each in steps(engine, range(STEPS), SEVERAL, dtype)]
        dense = [double(gradient(n, exchange.rank, dtype)) for n in range(STEPS)]
        return total(applied), double(kept(engine.state_dict(), "error")), total(dense)

    applied, residuals, dense = zip(*on_ranks(4, body), strict=True)
    assert sum(float(e.abs().sum()) for e in mean(residuals).values()) > 1
    assert_near(total([applied[0], mean(residuals)]), mean(dense), tolerance)


def double(tensors: Named) -> Named:
    return {name: tensor.double() for name, tensor in tensors.items()}


def test_matrices_are_compressed_only_if_that_makes_them_smaller() -> None:
    shape = BucketShape.of(tuple(SHAPES), parameters())
    for rank in (1, 2, 7):
        sizes = {
            slot.name: dict(zip(slot.names, slot.sizes, strict=True))
            for slot in PowerSGD(rank).slots(shape, 4, 0)
        }
        compressed = {n for n, p in parameters().items() if compresses(p, rank)}
        assert set(sizes["q"]) == compressed
    assert sizes["q"] == {"tall": 63}
    two = PowerSGD(2, min_ratio=3.0).slots(shape, 4, 0)[1]
    assert two.names == ("conv", "tall")[: len(two.names)]


def test_matrices_of_lower_rank_are_exact() -> None:
    """One row, one entry, one outer product, then zeros: no NaN, and the means are exact."""

    def body(exchange: Any) -> list[tuple[Named, Named]]:
        engine = averager("powersgd(3)", exchange)
        found = []
        for number in range(8):
            tensors = {name: torch.zeros(s, dtype=torch.float64) for name, s in SHAPES.items()}
            tall = tensors["tall"]
            if number % 4 == 0:
                tall[7] = torch.arange(9.0)
            elif number % 4 == 1:
                tall[3, 4] = 1e-200
            elif number % 4 == 2:
                tall += torch.outer(torch.arange(50.0), torch.arange(9.0)) * (1 + exchange.rank)
            found.append((tensors, step(engine, tensors)))
        return found

    outcomes = on_ranks(2, body)
    for number in range(8):
        dense = mean([outcome[number][0] for outcome in outcomes])
        assert_near(outcomes[0][number][1], dense, 1e-9)


def test_the_basis_recovers_from_zero_gradients_and_zero_rows() -> None:
    """After steps with zero gradients, Q must not stay zero: messages must approximate again."""

    def body(exchange: Any) -> tuple[Named, Named]:
        engine = averager("powersgd(2)", exchange)
        zeros = {name: torch.zeros(s, dtype=torch.float64) for name, s in SHAPES.items()}
        for _ in range(3):
            step(engine, zeros)
        dense, applied = [], []
        for number in range(30):
            tensors = gradient(number // 30, exchange.rank)
            tensors["tall"][:4] = 0.0
            dense.append(tensors)
            applied.append(step(engine, tensors))
        return total(dense), total(applied)

    dense, applied = zip(*on_ranks(2, body), strict=True)
    lost = (mean(dense)["tall"] - applied[0]["tall"]).norm() / mean(dense)["tall"].norm()
    assert lost < 0.2


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_very_small_and_very_large_gradients_stay_in_range(size: float) -> None:
    def body(exchange: Any) -> tuple[list[Named], list[Named]]:
        plain = averager("powersgd", exchange, dtype=torch.float32)
        sized = averager("powersgd", exchange, dtype=torch.float32)
        means, others = [], []
        for number in range(4):
            tensors = gradient(number, exchange.rank, torch.float32)
            means.append(step(plain, tensors))
            others.append(step(sized, {name: t * size for name, t in tensors.items()}))
        return means, others

    for means, others in on_ranks(2, body):
        for one, other in zip(means, others, strict=True):
            assert_near({n: t / size for n, t in other.items()}, one, 1e-3)
