"""Predicted rows: from measured collectives and a step without an exchange."""

from types import SimpleNamespace

import pytest
import torch

from torchcomp.advisor import Link
from torchcomp.advisor.doctor import prediction
from torchcomp.advisor.doctor.prediction import ERROR, METHODS, predicted_rows
from torchcomp.advisor.doctor.verdict import Row, judge
from torchcomp.advisor.recording import MOST_ELEMENTS

PARAMETERS = {"w": torch.empty(300, 500, device="meta"), "b": torch.empty(500, device="meta")}
ALONE = 0.05


def job(ranks=4):
    """A rank whose others report the same."""
    return SimpleNamespace(
        world_size=ranks,
        device=torch.device("cpu"),
        patience=1.0,
        gather=lambda name, value, seconds: [value] * ranks,
    )


def on(mbit, parameters=PARAMETERS, budget=100.0):
    times = Link(mbit / 1e3, latency_us=100, backend="gloo").flat(4)
    return predicted_rows(job(), parameters, ALONE, times, 1.0, budget)


def test_every_method_has_a_row_and_only_local_steps_are_marked():
    rows = on(1000)
    assert [row.method for row in rows] == list(METHODS)
    assert [row.method for row in rows if row.local] == ["every(8)"]
    for row in rows:
        assert row.steps == 0
        assert row.seconds >= ALONE
        assert row.low == pytest.approx(row.seconds * (1 - ERROR))
        assert row.high == pytest.approx(row.seconds * (1 + ERROR))


def test_a_dense_message_takes_its_time_on_a_slow_link():
    fast, slow = ({row.method: row.seconds for row in on(mbit)} for mbit in (10_000, 10))
    # 8 bits of 150,500 elements to and from the owners of shards, at 9 Mbit/s.
    least = 2 * 0.75 * 150_500 * 8 / 9e6
    assert slow['ef(quantize("int8"))'] > least > fast['ef(quantize("int8"))']
    assert slow["every(8)"] < slow['ef(quantize("int8"))']


def test_the_slowest_rank_counts():
    one = on(1000)
    slower = SimpleNamespace(**vars(job()))
    slower.gather = lambda name, value, seconds: [value, [value[0] + 7, value[1]]]
    times = Link(1.0, latency_us=100, backend="gloo").flat(4)
    other = predicted_rows(slower, PARAMETERS, ALONE, times, 1.0, 100.0)
    assert all(b.seconds > 7 > a.seconds for a, b in zip(one, other, strict=True))


def test_without_time_one_method_is_predicted_and_of_a_huge_model_none():
    assert len(on(1000, budget=0.0)) == 1
    huge = {"w": torch.empty(MOST_ELEMENTS + 1, device="meta")}
    assert on(1000, huge) == []


def measured(ddp, bf16):
    times = {"no exchange": 0.1, "DDP": ddp, "DDP, bf16 hook": bf16}
    return [Row(name, each, each, each, 9) for name, each in times.items()]


@pytest.mark.parametrize(("bf16", "named"), [(0.2, True), (0.4, False)])
def test_the_verdict_names_the_best_of_each_kind_that_is_faster(bf16, named):
    predicted = [
        Row("ef(topk(0.01))", 0.15, 0.1, 0.2, 0),
        Row("powersgd(rank=2)", 0.3, 0.2, 0.4, 0),
        Row("every(8)", 0.11, 0.1, 0.2, 0, local=True),
    ]
    verdict = judge(measured(0.4, bf16), predicted)
    assert verdict.bound == "network-bound"
    assert [row.method for row in verdict.rows[3:]] == [
        "every(8)",
        "ef(topk(0.01))",
        "powersgd(rank=2)",
    ]
    assert ("DDP, bf16 hook is 2.0x" in verdict.advice) == named
    assert "ef(topk(0.01)) is 2.7x" in verdict.advice
    assert "every(8) is 3.6x" in verdict.advice
    assert "powersgd" not in verdict.advice


def test_the_measured_methods_are_not_predicted():
    assert {"ddp", "bf16"}.isdisjoint(prediction.METHODS)
