"""The verdict on step times, measured and predicted."""

from types import SimpleNamespace

import pytest
import torch

from torchcomp.advisor import Link
from torchcomp.advisor.doctor.findings import ERROR, Row, judge, measured_rows, predicted_rows
from torchcomp.advisor.doctor.training import BF16, MODES, NO_EXCHANGE, PLAIN
from torchcomp.advisor.prediction import USUAL
from torchcomp.advisor.recording import MOST_ELEMENTS

PARAMETERS = {"w": torch.empty(300, 500, device="meta"), "b": torch.empty(500, device="meta")}
ALONE = 0.05


def on(mbit, parameters=PARAMETERS, budget=100.0, gather=lambda *row: [row[1]] * 4):
    """The predicted rows of a rank of four, whose others report the same."""
    job = SimpleNamespace(world_size=4, device=torch.device("cpu"), patience=1.0, gather=gather)
    times = Link(mbit / 1e3, latency_us=100, backend="gloo").among(4)
    return predicted_rows(job, parameters, ALONE, times, 1.0, budget)


def test_every_method_that_is_not_measured_has_a_row_and_only_local_steps_are_marked():
    rows = on(1000)
    assert [row.method for row in rows] == [spec for spec in USUAL if spec not in ("ddp", "bf16")]
    assert [row.method for row in rows if row.local] == ["every(8)"]
    for row in rows:
        assert (row.steps, row.seconds >= ALONE) == (0, True)
        interval = row.seconds * (1 - ERROR), row.seconds * (1 + ERROR)
        assert (row.low, row.high) == pytest.approx(interval)


def test_the_slowest_rank_counts_and_time_and_memory_end_it():
    slower = on(1000, gather=lambda name, value, _: [value, [value[0] + 7, value[1]]])
    assert all(row.seconds > 7 for row in slower)
    assert len(on(1000, budget=0.0)) == 1
    assert on(1000, {"w": torch.empty(MOST_ELEMENTS + 1, device="meta")}) == []
    ranks = [{PLAIN: [1.0, 2.0, 3.0]}, {PLAIN: [1.0, 5.0, 9.0, 5.0]}]
    assert measured_rows(ranks) == [Row(PLAIN, 5.0, 5.0, 5.0, 4)]
    assert measured_rows([{PLAIN: [4.0]}]) == [Row(PLAIN, 4.0, 4.0, 4.0, 1)]


def rows(floor, ddp, bf16, spread=0.0, steps=9):
    seconds = {NO_EXCHANGE: floor, PLAIN: ddp, BF16: bf16}
    return [Row(mode, t, t - spread, t + spread, steps) for mode, t in seconds.items()]


@pytest.mark.parametrize(
    ("measured", "bound", "waiting"),
    [
        (rows(0.1, 0.110, 0.110), "compute-bound", 1 / 11),
        (rows(0.1, 0.125, 0.125), "partly network-bound", 0.2),
        (rows(0.1, 0.250, 0.250), "network-bound", 0.6),
        # The steps vary by more than the exchange takes.
        (rows(0.1, 0.2, 0.2, spread=0.06), "unclear", 0.5),
        (rows(0.1, 0.2, 0.2, spread=0.04), "network-bound", 0.5),
        # One step does not show how they vary.
        (rows(0.1, 0.14, 0.14, steps=1), "unclear", 2 / 7),
        (rows(0.1, 0.2, 0.2, steps=1), "network-bound", 0.5),
        # Nothing can be faster than no exchange.
        (rows(0.1, 0.2, 0.08), "unclear", 0.5),
    ],
)
def test_a_verdict_is_the_share_of_the_step_that_waits(measured, bound, waiting):
    verdict = judge(measured)
    assert (verdict.bound, verdict.waiting) == (bound, pytest.approx(waiting))


@pytest.mark.parametrize(("bf16", "named"), [(0.2, True), (0.4, False)])
def test_the_advice_names_the_best_of_each_kind_that_is_faster(bf16, named):
    predicted = [
        Row("ef(topk(0.01))", 0.15, 0.1, 0.2, 0),
        Row("powersgd(rank=2)", 0.3, 0.2, 0.4, 0),
        Row("every(8)", 0.11, 0.1, 0.2, 0, local=True),
    ]
    verdict = judge(rows(0.1, 0.4, bf16), predicted)
    order = ["every(8)", "ef(topk(0.01))", "powersgd(rank=2)"]
    assert [row.method for row in verdict.rows] == [*MODES, *order]
    assert (f"{BF16} is 2.0x" in verdict.advice) == named
    assert "ef(topk(0.01)) is 2.7x" in verdict.advice
    assert "every(8) is 3.6x" in verdict.advice
    assert "powersgd" not in verdict.advice
