"""EF21 compared with its paper."""

from typing import Any

import pytest
import torch

from tests.aggregators import runs
from tests.aggregators.runs import Named, assert_equal, assert_near, mean, steps
from tests.support.models import kept
from torchcomp.engine.keys import Key
from torchcomp.reference import ef21, top_share

STEPS = 30
TOP = 'ef21(topk(0.05, scope="tensor"){})'


@pytest.mark.parametrize("route", ["allgather", "sharded"])
@pytest.mark.parametrize("world_size", [1, 4])
def test_equals_the_paper(world_size: int, route: str) -> None:
    def body(exchange: Any) -> tuple[list[Named], Named, Named]:
        engine = runs.averager(TOP.format(f', exchange="{route}"'), exchange, runs.SEVERAL)
        means = steps(engine, range(STEPS), runs.SEVERAL)
        state = engine.state_dict()
        return means, kept(state, "estimate"), kept(state, "mean_estimate")

    means, estimates = ef21(runs.history(STEPS, world_size), top_share(0.05))
    for worker, (applied, own, common) in enumerate(runs.on_ranks(world_size, body)):
        for actual, expected in zip(applied, means, strict=True):
            assert_near(actual, expected, 1e-12)
        assert_near(own, estimates[worker], 1e-12)
        assert_equal(common, applied[-1])


@pytest.mark.parametrize(
    ("spec", "dtype", "tolerance"),
    [
        (TOP.format(""), torch.float64, 1e-13),
        (TOP.format(""), torch.float32, 1e-5),
        (TOP.format(""), torch.bfloat16, 1e-5),
        ('ef21(topk(0.2, values="int8"))', torch.float32, 1e-5),
        ("ef21(randk(0.2))", torch.float32, 1e-5),
        ('ef21(cast("bf16"), exchange="allgather")', torch.float32, 1e-5),
    ],
)
def test_mean_estimate_is_the_mean_of_the_estimates(
    spec: str, dtype: torch.dtype, tolerance: float
) -> None:
    def body(exchange: Any) -> tuple[Named, Named]:
        engine = runs.averager(spec, exchange, runs.SEVERAL, dtype)
        steps(engine, range(STEPS), runs.SEVERAL, dtype)
        state = engine.state_dict()
        return kept(state, "estimate"), kept(state, "mean_estimate")

    own, common = zip(*runs.on_ranks(3, body), strict=True)
    for each in common:
        assert_equal(each, common[0])
    assert_near(common[0], mean(own), tolerance)


def test_estimates_of_constant_gradients_become_exact() -> None:
    def body(exchange: Any) -> tuple[Named, Named]:
        engine = runs.averager(TOP.format("").replace("0.05", "0.1"), exchange)
        constant = runs.gradient(0, exchange.rank)
        for _ in range(12):
            applied = runs.step(engine, constant)
        return constant, applied

    constants, applied = zip(*runs.on_ranks(3, body), strict=True)
    assert_near(applied[0], mean(constants), 1e-13)


def test_first_step_sends_the_gradient_itself() -> None:
    def body(exchange: Any) -> tuple[Named, Named]:
        tensors = runs.gradient(0, exchange.rank)
        return runs.step(runs.averager("ef21(identity)", exchange), tensors), tensors

    applied, tensors = zip(*runs.on_ranks(2, body), strict=True)
    assert_near(applied[0], mean(tensors), 1e-14)


def test_randk_draws_the_same_entries_on_all_ranks() -> None:
    def body(exchange: Any) -> Named:
        return runs.step(
            runs.averager('ef21(randk(0.25, scope="tensor"))', exchange), runs.gradient(0, 0)
        )

    sent = runs.on_ranks(2, body)[0]["wide"].flatten().nonzero().flatten()
    drawn = Key(5, 0).of_tensor("wide").shared().choice(240, 60, replace=False, shuffle=False)
    assert sent.tolist() == sorted(drawn.tolist())


@pytest.mark.parametrize("other", ["ef(topk(0.1))", "mean", "powersgd"])
def test_a_swap_to_ef21_flushes_the_residual_and_a_swap_from_it_loses_nothing(other: str) -> None:
    """Estimates are not unsent gradient, so dropping them loses nothing."""

    def body(exchange: Any) -> tuple[Named, Named, list[Named]]:
        engine = runs.averager(other, exchange)
        applied = steps(engine, range(4))
        engine.use("ef21(identity)")
        applied += steps(engine, range(4, 8))
        engine.use(other)
        applied += steps(engine, range(8, 12))
        state = engine.state_dict()
        zero = {
            name: torch.zeros(shape, dtype=torch.float64) for name, shape in runs.SHAPES.items()
        }
        residual = kept(state) or zero
        return mean(applied), residual, [runs.gradient(n, exchange.rank) for n in range(12)]

    applied, residuals, dense = zip(*runs.on_ranks(2, body), strict=True)
    expected = mean([mean(list(each)) for each in dense])
    # `expected` is a mean over the 12 steps.
    residual = {name: e / 12 for name, e in mean(residuals).items()}
    assert_near({n: applied[0][n] + residual[n] for n in runs.SHAPES}, expected, 1e-12)
