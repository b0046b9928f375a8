"""warmup(...): the stages, what they send, and that residuals pass from one to the next."""

import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch

import torchcomp
from tests.aggregators.runs import averager, on_ranks, steps
from tests.support.cases import thorough
from tests.support.outcomes import reloaded, same
from torchcomp.aggregators import EF
from torchcomp.compressors import Identity, TopK, Warmup
from torchcomp.engine.bucket import BucketShape
from torchcomp.jointspar.sampler import Sampled

UP = "warmup(topk(0.05), steps=6)"
# Stages of 2 steps with ratio 1, 0.25 and 0.0625, then 0.05.
STARTS = (0, 2, 4, 6)
RATIOS = (1.0, 0.25, 0.0625, 0.05)
METHODS = ["ef({0})", "bidirectional({0}, {0})", "ef21({0})"]
METHODS += thorough(
    ["{0}", 'ef({0}, exchange="sharded")', 'bidirectional({0}, {0}, selection="exact")']
)


def spec_of(ratio: float) -> str:
    return "identity" if ratio == 1 else f"topk({ratio})"


@pytest.mark.parametrize(
    ("spec", "starts", "ratios"),
    [
        (UP, STARTS, RATIOS),
        ("warmup(topk(0.05), steps=6, start=0.25)", (0, 3, 6), (0.25, 0.0625, 0.05)),
        ("warmup(topk(0.001), 3, start=0.1)", (0, 1, 2, 3), (0.1, 0.025, 0.00625, 0.001)),
        ("warmup(topk(0.001), 2)", (0, 1, 2), (1.0, 0.0625, 0.001)),
        ("dgc(warmup(topk(0.05), 3, start=0.25))", (0, 2, 3), (0.25, 0.0625, 0.05)),
        ("dgc(warmup(topk(0.001), 2, start=0.25))", (0, 1, 2), (0.25, 0.015625, 0.001)),
    ],
)
def test_ratio_falls_by_a_quarter_per_stage(
    spec: str, starts: tuple[int, ...], ratios: tuple[float, ...]
) -> None:
    method = torchcomp.parse(spec)
    stages = [spec_of(ratio) for ratio in ratios]
    assert method.stages == starts
    assert [str(method.at(start).compressor) for start in starts] == stages
    # Within a stage nothing changes, up to the step before the next one.
    assert [str(method.at(stop - 1).compressor) for _, stop in pairwise(starts)] == stages[:-1]
    assert str(method.at(10**9).compressor) == stages[-1]


def test_stages_keep_the_options_of_the_compressor() -> None:
    options = {"scope": "tensor", "values": "int4", "rounding": "stochastic"}
    warmup = Warmup(TopK(0.1, **options), steps=4)
    assert (warmup.at(0), warmup.at(2)) == (Identity(), TopK(0.25, **options))


def test_jointspar_hands_the_step_on() -> None:
    sampled = Sampled(torchcomp.parse(f"ef({UP})"), sampler=object())
    assert sampled.stages == STARTS
    assert sampled.at(0).inner == EF(Identity())
    assert sampled.at(0).sampler is sampled.sampler


def test_a_dense_stage_is_all_reduced_and_the_others_are_not() -> None:
    method = torchcomp.parse(f'ef({UP}, exchange="allgather")')
    shape = BucketShape(("a",), ((1000,),), torch.float32)
    collectives = [method.at(start).cost(shape, 3).collective for start in STARTS]
    assert collectives == ["allreduce", "allgather", "allgather", "allgather"]


def kept(engine: Any) -> dict[str, Any]:
    slots = engine.state_dict()["slots"]
    return {name: slot for name, slot in slots.items() if slot["kind"] != "cache"}


@pytest.mark.parametrize("method", METHODS)
def test_a_warm_up_is_a_swap_at_every_stage_also_after_a_resume(method: str) -> None:
    """Values, residuals on both sides, and the draws are those of the stages' own methods."""

    def body(exchange: Any) -> None:
        engine, resumed = (averager(method.format(UP), exchange) for _ in range(2))
        by_hand = averager(method.format("identity"), exchange)
        for start, stop, ratio in zip(STARTS, (*STARTS[1:], 9), RATIOS, strict=True):
            by_hand.use(method.format(spec_of(ratio)))
            for number in range(start, stop):
                resumed.load_state_dict(reloaded(engine.state_dict()))
                expected, actual, again = (
                    (steps(each, [number]), kept(each)) for each in (by_hand, engine, resumed)
                )
                assert same(actual, expected)
                assert same(again, expected)

    on_ranks(2, body)


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

    on_ranks(1, body)
