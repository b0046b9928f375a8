"""Tests that PowerSGD, EF21 and DGC all pass: specs, costs, state, roll-back, swaps."""

from typing import Any

import pytest
import torch

import torchcomp
from tests.aggregators.runs import (
    ONE,
    OTHERS,
    SEVERAL,
    SHAPES,
    Named,
    assert_equal,
    assert_near,
    averager,
    gradient,
    mean,
    on_ranks,
    parameters,
    step,
    steps,
    total,
)
from tests.support.cases import thorough
from tests.support.models import kept
from tests.support.outcomes import reloaded
from torchcomp import NonFiniteError, SpecError
from torchcomp.aggregators import AGGREGATORS
from torchcomp.bucket import BucketShape
from torchcomp.state import Kind

POWERSGD = "powersgd(rank=2)"
EF21 = 'ef21(topk(0.05, scope="tensor"))'
DGC = 'dgc(topk(0.05, scope="tensor"), momentum=0.9)'
PER_TENSOR = (POWERSGD, EF21, DGC)
"""Methods whose results do not depend on which parameters share a bucket."""
PER_BUCKET = ("ef21(topk(0.05))", "dgc(topk(0.05), momentum=0.9, warmup_steps=8)")
METHODS = (*PER_TENSOR, *PER_BUCKET)

# --- Spec strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("powersgd", "powersgd"),
        ("powersgd(rank=2)", "powersgd"),
        ("powersgd(4, min_ratio=2.0)", "powersgd(4, min_ratio=2.0)"),
        ("ef21(topk(0.05))", "ef21(topk(0.05))"),
        ('ef21(cast("bf16"), exchange="allgather")', 'ef21(cast("bf16"), exchange="allgather")'),
        ("dgc(topk(0.05), momentum=0.9)", "dgc(topk(0.05))"),
        (
            "dgc(topk(0.05), warmup_steps=100, momentum=0.8, nesterov=True)",
            "dgc(topk(0.05), momentum=0.8, nesterov=True, warmup_steps=100)",
        ),
    ],
)
def test_spec_is_printed_as_it_is_parsed(spec: str, canonical: str) -> None:
    method = torchcomp.parse(spec)
    assert str(method) == canonical
    assert torchcomp.parse(canonical) == method
    assert type(method) in AGGREGATORS


@pytest.mark.parametrize(
    ("spec", "option"),
    [
        ("powersgd(0)", "rank"),
        ("powersgd(2.5)", "rank"),
        ("powersgd(min_ratio=0)", "min_ratio"),
        ('powersgd(memory_dtype="int8")', "memory_dtype"),
        ("ef21", "compressor"),
        ("ef21(randk(0.1, unbiased=True))", "contractive"),
        ('ef21(topk(0.1), exchange="allreduce")', "exchange"),
        ("dgc(randk(0.1))", "randk"),
        ("dgc(topk(0.1), momentum=1.0)", "momentum"),
        ("dgc(topk(0.1), nesterov=1)", "nesterov"),
        ("dgc(topk(0.1), warmup_steps=-1)", "warmup_steps"),
        ("dgc(topk(k=5), warmup_steps=10)", "warmup_steps"),
    ],
)
def test_errors_of_invalid_options_name_the_option(spec: str, option: str) -> None:
    # Only the first line: the others show the spec, which has the option in it anyway.
    with pytest.raises(SpecError, match=rf"\A{spec.partition('(')[0]}\b.*\b{option}\b"):
        torchcomp.parse(spec)


# --- Costs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [3, *thorough([1, 4])])
@pytest.mark.parametrize("groups", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("spec", METHODS)
def test_counted_bytes_are_those_of_the_cost(
    spec: str, groups: tuple[tuple[str, ...], ...], world_size: int
) -> None:
    method = torchcomp.parse(spec.replace(", warmup_steps=8", ""))

    def body(exchange: Any) -> tuple[int, int]:
        engine = averager(str(method), exchange, groups, torch.float32)
        steps(engine, range(3), groups, torch.float32)
        return engine.stats.bytes_sent, engine.stats.bytes_received

    shapes = [BucketShape.of(names, parameters(torch.float32)) for names in groups]
    for rank, counted in enumerate(on_ranks(world_size, body)):
        planned = [0, 0]
        for shape in shapes:
            cost = method.cost(shape, world_size, rank)
            traffic = cost.load.traffic(world_size, 0)
            planned = [planned[0] + traffic.sent, planned[1] + traffic.received]
        # The bytes of each all-reduce are rounded down.
        assert counted == pytest.approx(planned, abs=len(shapes))


def test_kinds_of_the_slots() -> None:
    shape = BucketShape.of(tuple(SHAPES), parameters())
    kinds = {
        spec: {slot.name: slot.kind for slot in torchcomp.parse(spec).slots(shape, 4, 0)}
        for spec in PER_TENSOR
    }
    assert kinds[POWERSGD] == {"error": Kind.DEBT, "q": Kind.ESTIMATE}
    assert kinds[EF21] == {"estimate": Kind.ESTIMATE, "mean_estimate": Kind.ESTIMATE}
    assert kinds[DGC] == {"error": Kind.DEBT, "momentum": Kind.ESTIMATE}


# --- Buckets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", PER_TENSOR)
def test_buckets_can_change_in_every_step(spec: str) -> None:
    def body(exchange: Any) -> list[Named]:
        engine = averager(spec, exchange, SEVERAL)
        changing = [
            step(engine, gradient(n, exchange.rank), (ONE, SEVERAL, OTHERS)[n % 3])
            for n in range(12)
        ]
        return changing, steps(averager(spec, exchange, ONE), range(12))

    for changing, steady in on_ranks(3, body):
        for actual, expected in zip(changing, steady, strict=True):
            assert_near(actual, expected, 1e-12)


@pytest.mark.parametrize("spec", METHODS)
def test_replicas_get_the_same_bits(spec: str) -> None:
    outcomes = on_ranks(4, lambda exchange: steps(averager(spec, exchange, SEVERAL), range(10)))
    for outcome in outcomes[1:]:
        for actual, expected in zip(outcome, outcomes[0], strict=True):
            assert_equal(actual, expected)


# --- Resume ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, *thorough([torch.float32])], ids=str)
@pytest.mark.parametrize("groups", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("spec", METHODS)
def test_resumed_run_is_bit_equal(
    spec: str, groups: tuple[tuple[str, ...], ...], dtype: torch.dtype
) -> None:
    def body(exchange: Any) -> None:
        first = averager(spec, exchange, groups, dtype)
        steps(first, range(7), groups, dtype)
        state = reloaded(first.state_dict())
        second = averager(spec, exchange, groups, dtype, seed=99)
        second.load_state_dict(state)
        through, resumed = (steps(each, range(7, 14), groups, dtype) for each in (first, second))
        for actual, expected in zip(resumed, through, strict=True):
            assert_equal(actual, expected)
        for slot in state["slots"]:
            assert_equal(kept(second.state_dict(), slot), kept(first.state_dict(), slot))

    on_ranks(3, body)


# --- Roll-back ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), *thorough([float("inf"), -float("inf")])])
@pytest.mark.parametrize("name", ["tall", "bias", "conv"])
@pytest.mark.parametrize("spec", METHODS)
def test_one_bad_number_of_one_rank_leaves_no_trace(spec: str, name: str, bad: float) -> None:
    def body(exchange: Any) -> None:
        engine, undisturbed = averager(spec, exchange, SEVERAL), averager(spec, exchange, SEVERAL)
        for each in (engine, undisturbed):
            steps(each, range(4), SEVERAL)
        before = reloaded(engine.state_dict())
        spoiled = gradient(4, exchange.rank)
        if exchange.rank == 1:
            spoiled[name].view(-1)[3] = bad
        with pytest.raises(NonFiniteError, match=f"'{name}'.* on rank 1"):
            step(engine, spoiled, SEVERAL)
        assert engine.step == 4
        for slot, entry in before["slots"].items():
            assert_equal(kept(engine.state_dict(), slot), entry["tensors"])
        after, expected = (steps(e, range(5, 8), SEVERAL) for e in (engine, undisturbed))
        for one, other in zip(after, expected, strict=True):
            assert_equal(one, other)

    on_ranks(3, body)


@pytest.mark.parametrize("spec", METHODS)
def test_a_skipped_step_counts_and_leaves_no_trace(spec: str) -> None:
    def body(exchange: Any) -> None:
        engine = averager(spec, exchange, SEVERAL)
        steps(engine, range(3), SEVERAL)
        before = reloaded(engine.state_dict())
        spoiled = gradient(3, exchange.rank)
        spoiled["wide"][2, 3] = float("inf") if exchange.rank else 1.0
        step(engine, spoiled, SEVERAL, may_skip=True)
        assert engine.step == 4
        for slot, entry in before["slots"].items():
            assert_equal(kept(engine.state_dict(), slot), entry["tensors"])

    on_ranks(2, body)


@pytest.mark.parametrize("spec", METHODS)
def test_zero_gradients_stay_finite_and_training_can_continue(spec: str) -> None:
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}

    def body(exchange: Any) -> tuple[list[Named], Named]:
        engine = averager(spec, exchange, SEVERAL)
        quiet = [step(engine, zeros, SEVERAL) for _ in range(3)]
        return quiet, total(steps(engine, range(5), SEVERAL))

    for quiet, applied in on_ranks(2, body):
        for each in quiet:
            assert_equal(each, zeros)
        for name in ("conv", "wide", "tall"):
            assert applied[name].isfinite().all()
            assert applied[name].abs().sum() > 1


# --- Scale, ranks, swap ---------------------------------------------------------------------------


@pytest.mark.parametrize("spec", METHODS)
def test_loss_scale_does_not_matter(spec: str) -> None:
    def scale(number: int) -> float:
        return (1.0, 2.0, 1024.0, 0.5)[number // 3 % 4]

    def body(exchange: Any) -> None:
        scaled = steps(averager(spec, exchange), range(14), scale=scale)
        for actual, expected in zip(
            scaled, steps(averager(spec, exchange), range(14)), strict=True
        ):
            assert_equal(actual, expected)

    on_ranks(3, body)


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("spec", METHODS)
def test_state_is_redistributed_to_another_number_of_ranks(spec: str, world_size: int) -> None:
    def before(exchange: Any) -> dict[str, Any]:
        engine = averager(spec, exchange)
        steps(engine, range(6))
        return engine.state_dict()

    states = on_ranks(3, before)
    fewer = torchcomp.redistribute([reloaded(state) for state in states], world_size)

    def after(exchange: Any) -> list[Named]:
        engine = averager(spec, exchange)
        engine.load_state_dict(reloaded(fewer[exchange.rank]))
        return steps(engine, range(6, 9))

    for slot in states[0]["slots"]:
        assert_near(
            mean([kept(state, slot) for state in fewer]),
            mean([kept(state, slot) for state in states]),
            1e-12,
        )
    outcomes = on_ranks(world_size, after)
    for outcome in outcomes:
        for actual, expected in zip(outcome, outcomes[0], strict=True):
            assert_equal(actual, expected)


@pytest.mark.parametrize("order", [1, -1], ids=["to", "from"])
@pytest.mark.parametrize("other", ["mean", "ef(topk(0.05))", DGC.replace("0.9", "0.0")])
@pytest.mark.parametrize("spec", [POWERSGD, DGC.replace("0.9", "0.0")])
def test_a_swap_loses_nothing(spec: str, other: str, order: int) -> None:
    """Applied means + mean residual = dense means. EF21 has no residual; see test_ef21.py."""
    first, second = (spec, other)[::order]

    def body(exchange: Any) -> tuple[Named, Named, Named]:
        engine = averager(first, exchange)
        applied = steps(engine, range(5))
        engine.use(second)
        if "mean" not in (first, second):
            norms = engine.residual_norms()
            assert sum(norms.values()) > 1
        applied += steps(engine, range(5, 12))
        state = engine.state_dict()
        residual = kept(state)
        zero = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        return (
            total(applied),
            {**zero, **residual},
            total([gradient(n, exchange.rank) for n in range(12)]),
        )

    applied, residuals, dense = zip(*on_ranks(3, body), strict=True)
    assert_near(total([applied[0], mean(residuals)]), mean(dense), 1e-11)
