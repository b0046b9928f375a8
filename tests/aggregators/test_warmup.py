"""warmup(...): the stages, what they send, and that residuals pass from one to the next."""

import weakref
from itertools import pairwise
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
    mean,
    on_ranks,
    steps,
    total,
)
from tests.support.cases import thorough
from tests.support.models import kept
from tests.support.outcomes import reloaded
from torchcomp import SpecError, explain
from torchcomp.aggregators import EF, Aggregator
from torchcomp.algorithms.checks import require
from torchcomp.bucket import BucketShape
from torchcomp.compressors import TopK, Warmup

TOP = "topk(0.05)"
UP = f"warmup({TOP}, steps=6)"
# Stages of 2 steps with ratio 1, 0.25 and 0.0625, then 0.05.
STARTS = (0, 2, 4, 6)
RATIOS = (1.0, 0.25, 0.0625, 0.05)
METHODS = [
    "ef({0})",
    'ef({0}, exchange="sharded")',
    "bidirectional({0}, {0})",
    "ef21({0})",
    *thorough(
        [
            "{0}",
            "bidirectional({0}, topk(0.1))",
            "bidirectional(topk(0.1), {0})",
            'bidirectional({0}, {0}, selection="exact")',
            'ef({0}, memory_dtype="bf16")',
        ]
    ),
]


def spec_of(ratio: float) -> str:
    return "identity" if ratio == 1 else f"topk({ratio})"


# --- Stages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "starts", "ratios"),
    [
        (UP, STARTS, RATIOS),
        ("warmup(topk(0.05), steps=6, start=0.25)", (0, 3, 6), (0.25, 0.0625, 0.05)),
        ("warmup(topk(0.25), steps=10)", (0, 10), (1.0, 0.25)),
        ("warmup(topk(0.001), 3, start=0.1)", (0, 1, 2, 3), (0.1, 0.025, 0.00625, 0.001)),
        # Fewer steps than ratios.
        ("warmup(topk(0.001), 2)", (0, 1, 2), (1.0, 0.0625, 0.001)),
    ],
)
def test_ratio_falls_by_a_quarter_per_stage(
    spec: str, starts: tuple[int, ...], ratios: tuple[float, ...]
) -> None:
    warmup = torchcomp.parse(spec).compressor
    assert warmup.stages == starts
    stages = [spec_of(ratio) for ratio in ratios]
    assert [str(warmup.at(start)) for start in starts] == stages
    # Within a stage nothing changes, up to the step before the next one.
    assert [str(warmup.at(stop - 1)) for _, stop in pairwise(starts)] == stages[:-1]
    assert str(warmup.at(10**9)) == stages[-1]


@pytest.mark.parametrize(
    ("spec", "option"),
    [
        ("warmup(topk(k=5), steps=10)", "ratio"),
        ('warmup(quantize("int8"), steps=10)', "ratio"),
        ("warmup(warmup(topk(0.1), steps=5), steps=10)", "ratio"),
        ("warmup(mean, steps=10)", "mean"),
        ("warmup(topk(0.1), steps=0)", "steps"),
        ("warmup(topk(0.1), steps=2.5)", "steps"),
        ("warmup(topk(0.1))", "steps"),
        ("warmup(topk(0.1), steps=10, start=0.1)", "start"),
        ("warmup(topk(0.1), steps=10, start=1.5)", "start"),
    ],
)
def test_errors_of_invalid_options_name_the_option(spec: str, option: str) -> None:
    with pytest.raises(SpecError, match=rf"\Awarmup\b.*\b{option}\b"):
        torchcomp.parse(spec)


def test_a_warm_up_is_held_to_what_its_compressor_cannot_do() -> None:
    for spec, option in (
        (f'ef({UP}, exchange="allreduce")', "exchange"),
        ("ef(warmup(randk(0.1, unbiased=True), steps=5))", "contractive"),
        # All momentum would be masked in a dense stage.
        (f"dgc({UP})", "start"),
        ("dgc(warmup(topk(0.1), 5, start=0.25), warmup_steps=5)", "warmup_steps"),
    ):
        with pytest.raises(SpecError, match=rf"\b{option}\b"):
            torchcomp.parse(spec)


def test_methods_whose_theory_has_constants_refuse_a_warm_up() -> None:
    with pytest.raises(SpecError, match=r"\Adown\b.*warmup"):
        require("contractive", Warmup(TopK(0.1), steps=5), 100, "down")


def test_a_dense_stage_is_all_reduced_and_the_others_are_not() -> None:
    method = torchcomp.parse(f'ef({UP}, exchange="allgather")')
    shape = BucketShape(("a",), ((1000,),), torch.float32)
    collectives = [method.at(start).cost(shape, 3).collective for start in STARTS]
    assert collectives == ["allreduce", "allgather", "allgather", "allgather"]


# --- Runs -----------------------------------------------------------------------------------------


def swapped(method: str, exchange: Any) -> tuple[list[Named], dict[str, Any]]:
    """Run the stages as a user would by hand, with a swap at the start of each."""
    engine = averager(method.format("identity"), exchange, SEVERAL)
    means = []
    for start, stop, ratio in zip(STARTS, (*STARTS[1:], 9), RATIOS, strict=True):
        engine.use(method.format(spec_of(ratio)))
        means += steps(engine, range(start, stop), SEVERAL)
    return means, engine.state_dict()["slots"]


@pytest.mark.parametrize("method", METHODS)
def test_a_warm_up_is_a_swap_at_every_stage(method: str) -> None:
    """Values, residuals on both sides, and the draws are those of the stages' own methods."""

    def body(exchange: Any) -> None:
        engine = averager(method.format(UP), exchange, SEVERAL)
        means = steps(engine, range(9), SEVERAL)
        expected, slots = swapped(method, exchange)
        for actual, wanted in zip(means, expected, strict=True):
            assert_equal(actual, wanted)
        for slot, entry in slots.items():
            assert_equal(kept(engine.state_dict(), slot), entry["tensors"])

    on_ranks(3, body)


def test_warmup_steps_of_dgc_are_a_warm_up_of_its_compressor() -> None:
    def body(exchange: Any) -> None:
        specs = ("dgc(warmup(topk(0.01), 6, start=0.25))", "dgc(topk(0.01), warmup_steps=6)")
        runs = [steps(averager(spec, exchange), range(8)) for spec in specs]
        for actual, wanted in zip(*runs, strict=True):
            assert_equal(actual, wanted)

    on_ranks(2, body)


@pytest.mark.parametrize("at", [1, 3, *thorough([5, 7])])
@pytest.mark.parametrize("method", METHODS)
def test_resumed_run_is_bit_equal(method: str, at: int) -> None:
    def body(exchange: Any) -> None:
        first, second = (averager(method.format(UP), exchange, SEVERAL) for _ in range(2))
        steps(first, range(at), SEVERAL)
        second.load_state_dict(reloaded(first.state_dict()))
        for actual, wanted in zip(
            steps(second, range(at, 9), SEVERAL), steps(first, range(at, 9), SEVERAL), strict=True
        ):
            assert_equal(actual, wanted)

    on_ranks(2, body)


def test_nothing_is_lost_from_stage_to_stage() -> None:
    def body(exchange: Any) -> tuple[Named, Named, Named]:
        engine = averager(f"ef({UP})", exchange)
        applied = total(steps(engine, range(9)))
        return (
            applied,
            kept(engine.state_dict()),
            total([gradient(n, exchange.rank) for n in range(9)]),
        )

    applied, residuals, dense = zip(*on_ranks(3, body), strict=True)
    assert_near(total([applied[0], mean(residuals)]), mean(dense), 1e-11)


def test_workspaces_of_a_stage_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[weakref.ref[Any]] = []
    aggregate = EF.aggregate

    def noted(self: EF, g: Any, bucket: Any, key: Any) -> None:
        prepared.append(weakref.ref(bucket))
        aggregate(self, g, bucket, key)

    monkeypatch.setattr(EF, "aggregate", noted)

    def body(exchange: Any) -> None:
        engine = averager(f"ef({UP})", exchange)
        prepared.clear()  # of the rehearsal
        steps(engine, range(2))
        assert all(each() is not None for each in prepared)
        steps(engine, range(2, 3))
        *before, now = (each() for each in prepared)
        assert now is not None
        assert not any(before[: len(prepared) * 2 // 3])
        prepared.clear()
        steps(engine, range(3, 4))
        assert all(each() is not None for each in prepared)

    on_ranks(1, body)


# --- Costs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [f"ef({UP})", f"bidirectional({UP}, topk(0.1))"])
def test_counted_bytes_are_those_of_the_stages(spec: str) -> None:
    model = torch.nn.ParameterDict({n: torch.zeros(s) for n, s in SHAPES.items() if 0 not in s})

    def body(exchange: Any) -> list[int]:
        engine = torchcomp.Averager(spec, exchange, dict(model.named_parameters()))
        sent = []
        for _ in range(8):
            engine.average_all({n: torch.randn_like(p) for n, p in model.named_parameters()})
            sent.append(engine.stats.bytes_sent)
        return sent

    method, options = torchcomp.parse(spec), {"model": model, "world_size": 2}
    sent = on_ranks(2, body)[0]
    assert sent == [explain(method.at(n), **options).bytes_sent for n in range(8)]
    plan = explain(spec, **options)
    assert plan.bytes_sent == sent[-1]
    assert (plan.warmup_steps, plan.warmup_bytes_sent) == (6, round(sum(sent[:6]) / 6))
    # The dense stage sends no indices.
    assert sent[0] == plan.dense_bytes_sent or "bidirectional" in spec


def test_a_plan_of_a_schedule_averages_over_the_exchanges_of_the_run() -> None:
    options = {"numel": 1000, "world_size": 2, "total_steps": 40}
    plan = explain("every(4)", compress=f"ef({UP})", **options)
    method = torchcomp.parse(f"ef({UP})")
    assert isinstance(method, Aggregator)
    stages = [explain(method.at(n), numel=1000, world_size=2).bytes_sent for n in range(10)]
    assert plan.bytes_sent == round(sum(stages) / 40)
    assert (plan.warmup_steps, plan.warmup_bytes_sent) == (None, None)
