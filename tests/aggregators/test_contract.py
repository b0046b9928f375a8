"""Every method x every law: what holds for each aggregator, without DDP, on ranks of this process.

A law is a function of a spec. A method that a law does not apply to passes it at once.
"""

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
    on_ranks,
    parameters,
    step,
    steps,
    total,
)
from tests.support.cases import only
from tests.support.models import METHODS
from tests.support.outcomes import messages_of, raised_by, reloaded, same
from torchcomp import NonFiniteError, redistribute
from torchcomp.aggregators import AGGREGATORS, Aggregator
from torchcomp.aggregators.base import Residual
from torchcomp.engine.bucket import BucketShape, memory_order

PER_TENSOR = (
    "powersgd(rank=2)",
    'ef21(topk(0.05, scope="tensor"))',
    'dgc(topk(0.05, scope="tensor"), momentum=0.9)',
)
SPECS = (*METHODS, *PER_TENSOR, "dgc(warmup(topk(0.05), steps=8, start=0.25), nesterov=True)")
NOW = (
    *("mean", "topk(0.1)", 'ef(topk(0.1), exchange="sharded")', "ef21(topk(0.1))"),
    *("ef(warmup(topk(0.1), steps=3))", 'ef(cast("fp16"), exchange="allgather")'),
    'ef(topk(0.1, scope="tensor"), memory_dtype="bf16")',
    'bidirectional(topk(0.1), topk(0.1), selection="exact")',
    'bidirectional(randk(0.1), quantize("int4", rounding="stochastic"))',
    *SPECS[len(METHODS) :],
)
"""One spec for each path of the code; the others are left to `make test-thorough`."""

BOTH = 'bidirectional(topk(0.1), topk(0.1), selection="exact")'


def groups_of(spec: str) -> Any:
    return ONE if torchcomp.parse(spec).whole_model else SEVERAL


def wide(tensors: Named) -> Named:
    return {name: tensor.double() for name, tensor in tensors.items()}


def slots_of(states: list[Any]) -> dict[str, Named]:
    """The mean of each slot over the ranks; the shards of the server residual, put together."""
    (whole,) = redistribute(states, 1)
    like, found = parameters(), {}
    for name, slot in whole["slots"].items():
        tensors = wide(slot["tensors"])
        if slot["sharded"]:
            tensors = {n: memory_order(like[n], flat) for n, flat in tensors.items()}
        found[name] = tensors
    return found


# --- Laws -----------------------------------------------------------------------------------------


def the_method_accounts_for_every_gradient(spec: str, dtype: torch.dtype = torch.float64) -> None:
    """What `Aggregator.law` says of the mean, the gradients and the slots holds in each step."""
    groups = groups_of(spec)

    def body(exchange: Any) -> list[Any]:
        engine, found = averager(spec, exchange, dtype), []
        for number in range(5):
            before = engine.state_dict()
            (mean,) = steps(engine, [number], dtype)
            g = gradient(number, exchange.rank, dtype)
            found.append((wide(mean), wide(g), before, engine.state_dict()))
        return found

    method = torchcomp.parse(spec)
    shapes = [BucketShape.of(names, parameters(dtype)) for names in groups]
    for number, ranks in enumerate(zip(*on_ranks(3, body), strict=True)):
        means, gradients, *states = zip(*ranks, strict=True)
        slots = [slots_of(list(each)) for each in states]
        for names, shape in zip(groups, shapes, strict=True):
            law = method.at(number).law(shape)
            assert law is not None
            rest = {n: means[0][n] - law.gradient * total(gradients)[n] / 3 for n in names}
            for slot, when, factor in law.terms():
                for name in names:
                    if name in slots[when][slot]:
                        rest[name] = rest[name] + factor * slots[when][slot][name]
            norm = sum(float(g[n].square().sum()) for g in gradients for n in names) ** 0.5
            least = 1e-2 if "bf16" in spec else 1e-12 if dtype == torch.float64 else 1e-6
            if dtype != torch.float64 and not isinstance(method, Residual):
                least = 1e-2  # nothing records what rounding the mean loses
            lost = sum(float(each.square().sum()) for each in rest.values()) ** 0.5
            assert lost <= (law.error + least) * norm, (number, names)
        if "mean_estimate" in slots[1]:
            assert_near(slots[1]["mean_estimate"], slots[1]["estimate"], 1e-5)


def it_does_so_in_16_bits(spec: str) -> None:
    the_method_accounts_for_every_gradient(spec, torch.bfloat16)


def replicas_and_a_resumed_run_are_equal_bit_for_bit(spec: str) -> None:
    def body(exchange: Any) -> Any:
        whole = averager(spec, exchange, torch.bfloat16)
        found = []
        for start, stop in ((0, 4), (4, 8)):
            resumed = averager(spec, exchange, torch.bfloat16, seed=99)
            resumed.load_state_dict(reloaded(whole.state_dict()))
            runs = [steps(e, range(start, stop), torch.bfloat16) for e in (whole, resumed)]
            assert same(*runs)
            assert same(*(messages_of(each.state_dict()) for each in (whole, resumed)))
            found.append(runs[0])
        return found

    outcomes = on_ranks(3, body)
    assert all(same(outcome, outcomes[0]) for outcome in outcomes)
    assert all(t.isfinite().all() for run in outcomes[0] for means in run for t in means.values())


def a_number_that_is_not_finite_leaves_no_trace(spec: str) -> None:
    if torchcomp.parse(spec).transparent:
        return

    def body(exchange: Any, dtype: torch.dtype) -> None:
        engine, undisturbed = (averager(spec, exchange, dtype) for _ in range(2))
        for each in (engine, undisturbed):
            steps(each, range(1), dtype)  # a warm-up is then dense
        for name, bad in (("tall", torch.nan), ("bias", torch.inf), ("conv", -torch.inf)):
            before, spoiled = engine.state_dict(), gradient(1, exchange.rank, dtype)
            if exchange.rank == 1:
                spoiled[name].view(-1)[3] = spoiled["scale"][()] = bad
            error = raised_by(lambda g=spoiled: step(engine, g))
            assert type(error) is NonFiniteError
            assert all(f"'{each}'" in str(error) for each in (name, "scale"))
            assert "on rank 1" in str(error)
            assert "rank 0" not in str(error)
            assert "step 2" in str(error)
            assert same(engine.state_dict() | {"traffic": 0}, before | {"traffic": 0})
        # Where it may be skipped, as with a loss scale, the step counts.
        step(engine, spoiled, may_skip=True)
        assert same(engine.state_dict()["slots"], before["slots"])
        assert engine.step == 2
        step(undisturbed, spoiled, may_skip=True)
        assert same(*(steps(e, range(2, 4), dtype) for e in (engine, undisturbed)))

    # In 16 bits, no residual shows which gradients were not finite.
    for dtype in (torch.float64, torch.float16):
        on_ranks(3, lambda exchange, dtype=dtype: body(exchange, dtype))


def zero_gradients_stay_finite_and_training_can_continue(spec: str) -> None:
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}

    def body(exchange: Any) -> Named:
        engine = averager(spec, exchange)
        for _ in range(3):
            assert_equal(step(engine, zeros), zeros)
        return total(steps(engine, range(5)))

    for applied in on_ranks(2, body):
        for name in ("conv", "wide", "tall"):
            assert applied[name].isfinite().all()
        assert sum(float(each.abs().sum()) for each in applied.values()) > 1


def the_loss_scale_does_not_matter(spec: str) -> None:
    if "quantize" in spec or "values" in spec or "fp16" in spec:
        return  # scales in float32, and the range of fp16
    scale = lambda number: (1.0, 2.0, 1024.0, 0.5)[number // 2 % 4]  # noqa: E731

    def body(exchange: Any) -> bool:
        scaled, plain = (averager(spec, exchange) for _ in range(2))
        found = steps(scaled, range(3), scale=scale)
        resumed = averager(spec, exchange)
        resumed.load_state_dict(scaled.state_dict())
        found += steps(resumed, range(3, 9), scale=scale)
        return same(found, steps(plain, range(9)))

    assert on_ranks(2, body) == [True] * 2


def another_number_of_ranks_keeps_the_means_of_the_slots(spec: str) -> None:
    def before(exchange: Any) -> dict[str, Any]:
        engine = averager(spec, exchange)
        steps(engine, range(5))
        return engine.state_dict()

    states = on_ranks(3, before)
    for world_size in (1, 2, 5):
        other = [reloaded(state) for state in redistribute(states, world_size)]

        def after(exchange: Any, other: Any = other) -> list[Named]:
            engine = averager(spec, exchange)
            engine.load_state_dict(other[exchange.rank])
            return steps(engine, range(5, 8))

        for slot, tensors in slots_of(states).items():
            tolerance = 1e-2 if "bf16" in spec else 1e-12
            assert_near(slots_of(other)[slot], tensors, tolerance)
        outcomes = on_ranks(world_size, after)
        assert all(same(outcome, outcomes[0]) for outcome in outcomes)


def a_swap_loses_nothing(spec: str) -> None:
    """Applied means + mean residual = dense means, from and to the method."""
    method = torchcomp.parse(spec)
    law = method.law(BucketShape.of(tuple(SHAPES), parameters()))
    if not isinstance(method, Residual) or law is None or law.error or "momentum" in law.before:
        return

    def body(exchange: Any) -> tuple[Named, Named, Any]:
        engine = averager("ef(topk(0.05))", exchange)
        applied = steps(engine, range(4))
        for other in (spec, BOTH, spec, "mean", spec, "ef21(identity)"):
            engine.use(other)
            applied += steps(engine, range(len(applied), len(applied) + 4))
        engine.use(spec)
        applied += steps(engine, range(28, 32))
        assert sum(engine.residual_norms().values()) > 0.1 or "identity" in spec
        declared = {slot.name for slot in engine.slots(method)}
        assert engine.state_dict()["slots"].keys() == declared, "the flush has ended"
        dense = total([gradient(n, exchange.rank) for n in range(32)])
        return total(applied), dense, engine.state_dict()

    applied, dense, states = zip(*on_ranks(3, body), strict=True)
    slots = slots_of(list(states))
    rest = {n: applied[0][n] - total(dense)[n] / 3 for n in SHAPES}
    for slot in {"error", "server_error"} & slots.keys():
        rest = {n: rest[n] + slots[slot][n] if n in slots[slot] else rest[n] for n in SHAPES}
    tolerance = 0.5 if "bf16" in spec else 1e-10
    assert_near(rest, {n: torch.zeros_like(t) for n, t in rest.items()}, tolerance)


def the_bytes_are_those_of_the_cost(spec: str) -> None:
    method, groups = torchcomp.parse(spec), groups_of(spec)
    if "exact" in spec or "sharded" in spec or len(method.stages) > 1:
        return  # how the entries spread depends on their values; and see test_warmup.py

    def body(exchange: Any) -> tuple[int, int]:
        engine = averager(spec, exchange, torch.float32)
        steps(engine, range(3), torch.float32)
        return engine.stats.bytes_sent, engine.stats.bytes_received

    shapes = [BucketShape.of(names, parameters(torch.float32)) for names in groups]
    for rank, counted in enumerate(on_ranks(3, body)):
        loads = [method.cost(shape, 3, rank).load.traffic(3, 0) for shape in shapes]
        planned = sum(load.sent for load in loads), sum(load.received for load in loads)
        # The bytes of each all-reduce are rounded down.
        assert counted == pytest.approx(planned, abs=len(shapes))


LAWS = (
    the_method_accounts_for_every_gradient,
    it_does_so_in_16_bits,
    replicas_and_a_resumed_run_are_equal_bit_for_bit,
    a_number_that_is_not_finite_leaves_no_trace,
    zero_gradients_stay_finite_and_training_can_continue,
    the_loss_scale_does_not_matter,
    another_number_of_ranks_keeps_the_means_of_the_slots,
    a_swap_loses_nothing,
    the_bytes_are_those_of_the_cost,
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("spec", only(SPECS, now=NOW))
def test_every_method_keeps_every_law(spec: str, law: Any) -> None:
    law(spec)


def test_the_matrix_has_every_method() -> None:
    methods = [torchcomp.parse(spec) for spec in NOW]
    assert {type(method) for method in methods} == set(AGGREGATORS)
    assert all(isinstance(method, Aggregator) for method in methods)


# --- Methods whose results do not depend on which parameters share a bucket -----------------------


@pytest.mark.parametrize("spec", PER_TENSOR)
def test_buckets_can_change_in_every_step_and_after_a_resume(spec: str) -> None:
    def body(exchange: Any) -> Any:
        engine, steady = averager(spec, exchange), averager(spec, exchange, groups=ONE)
        for number in range(12):
            groups = (ONE, SEVERAL, OTHERS)[number % 3]
            changing = step(engine, gradient(number, exchange.rank), groups=groups)
            assert_near(changing, steps(steady, [number])[0], 1e-12)
        first, second = averager(spec, exchange), averager(spec, exchange, groups=OTHERS)
        steps(first, range(7))
        second.load_state_dict(reloaded(first.state_dict()))
        return same(steps(first, range(7, 14)), steps(second, range(7, 14)))

    assert all(on_ranks(3, body))
