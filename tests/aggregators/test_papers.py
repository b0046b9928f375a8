"""Methods compared with their papers' loops in torchcomp.reference, in process and through DDP."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

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
from tests.support.models import kept
from torchcomp.aggregators import PowerSGD
from torchcomp.engine.bucket import BucketShape
from torchcomp.reference import (
    History,
    bidirectional,
    compresses,
    dgc,
    ef21,
    error_feedback,
    powersgd,
    top_share,
)

STEPS = 20
TOP = 'topk(0.1, scope="tensor")'
SENT = top_share(0.1)
SHARES = [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.00390625, 0.00390625]
"""The paper's warm-up: 75 %, 93.75 %, 98.4 % and 99.6 % are not sent."""

Twin = Callable[[History], tuple[list[Named], dict[str, list[Named]]]]
"""From gradients to the means of all steps, and the state of all workers at the end, by slot."""


def twin(method: Any, *slots: str, **options: Any) -> Twin:
    def run(g: History) -> Any:
        means, *states = method(g, **options)
        return means, dict(zip(slots, states, strict=False))

    return run


def warming_up(x: Tensor, t: int, name: str) -> Tensor:
    return top_share(SHARES[t] if t < len(SHARES) else 0.001)(x, t, name)


EF = {"compress": SENT}
PAPERS: dict[str, Twin] = {
    "powersgd(rank=1)": twin(powersgd, "error", rank=1, start=first_q),
    f"ef21({TOP})": twin(ef21, "estimate", **EF),
    f"dgc({TOP}, momentum=0.8)": twin(dgc, "error", "momentum", momentum=0.8, **EF),
    "powersgd(rank=4)": twin(powersgd, "error", rank=4, start=first_q),
    f'ef21({TOP}, exchange="sharded")': twin(ef21, "estimate", **EF),
    f'dgc({TOP}, momentum=0.9, nesterov=True, exchange="allgather")': twin(
        dgc, "error", "momentum", momentum=0.9, nesterov=True, **EF
    ),
    f'dgc({TOP}, momentum=0.5, exchange="sharded")': twin(dgc, "error", momentum=0.5, **EF),
    'dgc(warmup(topk(0.001, scope="tensor"), steps=8, start=0.25))': twin(
        dgc, "error", "momentum", momentum=0.9, compress=warming_up
    ),
    f"ef({TOP})": twin(error_feedback, "error", **EF),
    f'bidirectional({TOP}, topk(0.2, scope="tensor"), selection="exact")': twin(
        bidirectional, "error", up=SENT, down=top_share(0.2)
    ),
}


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("groups", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("spec", PAPERS)
def test_equals_the_paper(spec: str, groups: tuple[tuple[str, ...], ...], world_size: int) -> None:
    def body(exchange: Any) -> tuple[list[Named], Any]:
        engine = averager(spec, exchange, groups=groups)
        return steps(engine, range(STEPS)), engine.state_dict()

    means, slots = PAPERS[spec](history(STEPS, world_size))
    for worker, (applied, state) in enumerate(on_ranks(world_size, body)):
        for actual, expected in zip(applied, means, strict=True):
            assert_near(actual, expected, 1e-10)
        for slot, expected in slots.items():
            assert_near(kept(state, slot), expected[worker], 1e-10)


# --- PowerSGD, for matrices that are hard to orthonormalize ---------------------------------------


def zeros() -> Named:
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}


def test_matrices_are_compressed_only_if_that_makes_them_smaller() -> None:
    shape = BucketShape.of(tuple(SHAPES), parameters())
    for rank in (1, 2, 7):
        _, q = PowerSGD(rank).slots(shape, 4, 0)
        assert set(q.names) == {n for n, p in parameters().items() if compresses(p, rank)}
    assert dict(zip(q.names, q.sizes, strict=True)) == {"tall": 63}
    assert PowerSGD(2, min_ratio=3.0).slots(shape, 4, 0)[1].names == ("conv", "tall")


def test_matrices_of_lower_rank_are_exact() -> None:
    """One row, one entry, one outer product, then zeros: no NaN, and the means are exact."""

    def body(exchange: Any) -> list[tuple[Named, Named]]:
        engine, found = averager("powersgd(3)", exchange), []
        for number in range(8):
            tensors = zeros()
            tall = tensors["tall"]
            if number % 4 == 0:
                tall[7] = torch.arange(9.0)
            elif number % 4 == 1:
                tall[3, 4] = 1e-200
            elif number % 4 == 2:
                tall += torch.outer(torch.arange(50.0), torch.arange(9.0)) * (1 + exchange.rank)
            found.append((tensors, step(engine, tensors)))
        return found

    for (own, applied), (others, _) in zip(*on_ranks(2, body), strict=True):
        assert_near(applied, mean([own, others]), 1e-9)


def test_the_basis_recovers_from_zero_gradients_and_zero_rows() -> None:
    """After steps with zero gradients, Q must not stay zero: messages must approximate again."""

    def body(exchange: Any) -> tuple[Named, Named]:
        engine = averager("powersgd(2)", exchange)
        for _ in range(3):
            step(engine, zeros())
        constant = gradient(0, exchange.rank)
        constant["tall"][:4] = 0.0
        return constant, total([step(engine, constant) for _ in range(30)])

    dense, applied = zip(*on_ranks(2, body), strict=True)
    expected = 30 * mean(dense)["tall"]
    assert (expected - applied[0]["tall"]).norm() / expected.norm() < 0.2


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_very_small_and_very_large_gradients_stay_in_range(size: float) -> None:
    def body(exchange: Any) -> None:
        plain, sized = (averager("powersgd", exchange, dtype=torch.float32) for _ in range(2))
        for number in range(4):
            tensors = gradient(number, exchange.rank, torch.float32)
            other = step(sized, {name: t * size for name, t in tensors.items()})
            assert_near({n: t / size for n, t in other.items()}, step(plain, tensors), 1e-3)

    on_ranks(2, body)
