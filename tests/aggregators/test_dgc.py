"""DGC compared with its paper: momentum correction, factor masking, warm-up."""

from typing import Any

import pytest
import torch

import torchcomp
from tests.aggregators.runs import (
    SEVERAL,
    SHAPES,
    Named,
    assert_equal,
    assert_near,
    averager,
    gradient,
    history,
    mean,
    on_ranks,
    steps,
    total,
)
from tests.aggregators.twins import dgc
from tests.support.cases import thorough
from tests.support.models import kept

STEPS = 30
TOP = 'topk(0.05, scope="tensor")'


@pytest.mark.parametrize(
    ("nesterov", "momentum", "route"),
    [(False, 0.9, "allgather"), (True, 0.9, "allgather"), (False, 0.5, "sharded")],
)
def test_equals_the_paper(nesterov: bool, momentum: float, route: str) -> None:
    spec = f'dgc({TOP}, momentum={momentum}, nesterov={nesterov}, exchange="{route}")'

    def body(exchange: Any) -> tuple[list[Named], Named, Named]:
        engine = averager(spec, exchange, SEVERAL)
        means = steps(engine, range(STEPS), SEVERAL)
        state = engine.state_dict()
        return means, kept(state, "error"), kept(state, "momentum")

    means, residuals, velocities = dgc(history(STEPS, 4), 0.05, momentum, nesterov)
    for worker, (applied, residual, velocity) in enumerate(on_ranks(4, body)):
        for actual, expected in zip(applied, means, strict=True):
            assert_near(actual, expected, 1e-11)
        assert_near(residual, residuals[worker], 1e-11)
        assert_near(velocity, velocities[worker], 1e-11)


def test_warm_up_ends_at_the_ratio_of_the_compressor() -> None:
    """The paper's warm-up: 75 %, 93.75 %, 98.4 % and 99.6 % are not sent, then 99.9 %."""
    shares = [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.00390625, 0.00390625]
    spec = 'dgc(topk(0.001, scope="tensor"), warmup_steps=8)'
    means, residuals, _ = dgc(history(12, 2), 0.001, 0.9, shares=tuple(shares))

    def body(exchange: Any) -> tuple[list[Named], Named]:
        engine = averager(spec, exchange)
        return steps(engine, range(12)), kept(engine.state_dict(), "error")

    for worker, (applied, residual) in enumerate(on_ranks(2, body)):
        for actual, expected in zip(applied, means, strict=True):
            assert_near(actual, expected, 1e-12)
        assert_near(residual, residuals[worker], 1e-12)


@pytest.mark.parametrize(
    ("ratio", "warmup", "expected"),
    [
        (0.3, 4, [0.3] * 6),
        (0.25, 4, [0.25] * 6),
        (0.1, 4, [0.25] * 4 + [0.1] * 2),
        (0.0625, 4, [0.25] * 4 + [0.0625] * 2),
        (0.05, 3, [0.25, 0.25, 0.0625, 0.05, 0.05, 0.05]),
        (0.001, 2, [0.25, 0.015625, 0.001, 0.001, 0.001, 0.001]),
        (0.05, 0, [0.05] * 6),
    ],
)
def test_stages_of_the_warm_up(ratio: float, warmup: int, expected: list[float]) -> None:
    numel = 10_000

    def body(exchange: Any) -> list[int]:
        method = torchcomp.parse(f"dgc(topk({ratio}), warmup_steps={warmup}, momentum=0.0)")
        parameters = {"x": torch.zeros(numel)}
        engine = torchcomp.Averager(method, exchange, parameters, [("x",)])
        sent = []
        for _ in range(6):
            tensors = {"x": torch.arange(1.0, numel + 1)}
            engine.average_all(tensors)
            sent.append(int((tensors["x"] != 0).sum()))
        return sent

    assert on_ranks(1, body)[0] == [-(-round(share * numel * 1e6) // 10**6) for share in expected]


def test_warm_up_continues_after_a_resume() -> None:
    def body(exchange: Any) -> None:
        first, second = (averager("dgc(topk(0.01), warmup_steps=9)", exchange) for _ in range(2))
        steps(first, range(4))
        second.load_state_dict(first.state_dict())
        resumed = steps(second, range(4, 12))
        for actual, expected in zip(resumed, steps(first, range(4, 12)), strict=True):
            assert_equal(actual, expected)

    on_ranks(2, body)


@pytest.mark.parametrize("compressor", ["topk(0.05)", TOP, 'topk(0.2, values="int4")'])
def test_without_momentum_it_is_ef(compressor: str) -> None:
    def body(exchange: Any) -> None:
        runs = []
        for spec in (f"ef({compressor})", f"dgc({compressor}, momentum=0.0)"):
            engine = averager(spec, exchange, SEVERAL, torch.float32)
            means = steps(engine, range(12), SEVERAL, torch.float32)
            runs.append((means, kept(engine.state_dict(), "error")))
        (means, residual), (others, other_residual) = runs
        for one, other in zip(means, others, strict=True):
            assert_equal(one, other)
        assert_equal(residual, other_residual)

    on_ranks(3, body)


@pytest.mark.parametrize("nesterov", [True, *thorough([False])])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 1e-4)]
)
def test_no_velocity_is_lost(dtype: torch.dtype, tolerance: float, nesterov: bool) -> None:
    """Applied means + mean residual = mean of all velocities, also with masking."""

    def body(exchange: Any) -> tuple[Named, Named, Named]:
        engine = averager(f"dgc({TOP}, nesterov={nesterov})", exchange, SEVERAL, dtype)
        velocity = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        applied, added = [], []
        for number in range(STEPS):
            g = {n: t.double() for n, t in gradient(number, exchange.rank, dtype).items()}
            velocity = {name: 0.9 * velocity[name] + g[name] for name in SHAPES}
            added.append({n: g[n] + 0.9 * velocity[n] for n in SHAPES} if nesterov else velocity)
            applied += steps(engine, [number], SEVERAL, dtype)
            velocity = {n: t.double() for n, t in kept(engine.state_dict(), "momentum").items()}
        residual = kept(engine.state_dict())
        return (
            total([{n: t.double() for n, t in each.items()} for each in applied]),
            {n: t.double() for n, t in residual.items()},
            total(added),
        )

    applied, residuals, added = zip(*on_ranks(3, body), strict=True)
    assert_near(total([applied[0], mean(residuals)]), mean(added), tolerance)
