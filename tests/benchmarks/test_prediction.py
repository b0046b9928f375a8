"""benchmarks/predict.py without shaped hosts, and the page that is made from its rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import predict, report_prediction, utilisation
from benchmarks.net.names import BF16, PLAIN
from benchmarks.net.predicted import Known
from benchmarks.net.rows import PREDICTIONS, Table
from torchcomp.advisor import ALL_REDUCE, ALL_TO_ALL, CollectiveTimes, Compute, Point
from torchcomp.advisor.activities import Call, Recording, Submitted, Work

TOPK = "ef(topk(0.01))"
COMMON = {"date": "2026-01-02", "revision": "0", "torch": "2", "device": "cpu", "cpus": 2}
COMMON |= {"batch": 16, "setup": {"hosts": 2, "ranks": 1, "mbit": 100, "delay_us": 500}}


def test_the_grid_has_enough_set_ups() -> None:
    count = sum(len(setup.models) for setup in predict.GRID) * len(predict.METHODS)
    assert count >= 200
    assert {setup.mbit for setup in predict.GRID} >= {10, 100, 1000, 10000}
    assert {setup.world for setup in predict.GRID} == {2, 4, 8, 16}


def test_rows_that_exist_are_skipped(tmp_path: Path) -> None:
    arguments = predict.parse(["--resume", "--out", str(tmp_path), "--hosts", "2", "--mbit", "10"])
    (setup,) = predict.chosen(arguments)
    table = Table(tmp_path / "predict.csv", PREDICTIONS)
    assert predict.pending(arguments, table, setup)[0] == ("smallcnn", predict.METHODS)
    row = predict.identity(setup, "smallcnn") | {"method": PLAIN}
    table.add(dict.fromkeys(PREDICTIONS, "") | row)
    ((_, left), (_, whole)) = predict.pending(arguments, table, setup)
    assert (left, whole) == (predict.METHODS[1:], predict.METHODS)


def results(method: str, recording: Recording) -> list[dict[str, Any]]:
    """What a job of two ranks reports: 1 s of backward pass, 0.5 s of optimizer, 1 s per MB."""
    curve = (Point(1, 1e-6), Point(10**6, 1.0))
    link = CollectiveTimes(2, {ALL_REDUCE: curve, ALL_TO_ALL: curve})
    compute = Compute((("p",),), (1.0,), 1.0, 1.5)
    computed = {"compute": compute.to_dict(), "wall": 4.0, "busy": 8.0, "worked": 4.0}
    labels = {**COMMON, "model": "mlp", "parameters": 5, "method": method, "levels": 1}
    step = {"times": [3.0, 4.0, 3.0], "length": 5, "wall": 10.0, "busy": 12.0, "worked": 5.0}
    parts = [
        {"what": "link", **COMMON, "ranks": [{"flat": link.to_dict()}] * 2},
        {"what": "compute", **labels, "ranks": [computed] * 2},
        {"what": "recording", **labels, "ranks": [recording.to_dict()] * 2},
        {"what": "step", **labels, "ranks": [step] * 2},
    ]
    return [json.loads(json.dumps(part)) for part in parts]


def test_a_row_compares_the_prediction_with_the_measured_step() -> None:
    activities = (Work(0.25), Call(ALL_REDUCE, 2 * 10**6), Work(0.25))
    recording = Recording(TOPK, (Submitted(("p",), ((activities,),)),))
    known, rows = Known(), []
    for result in results(TOPK, recording):
        rows.append(known.add(result))
    assert rows[:3] == [None, None, None]
    row = rows[3]
    assert row is not None
    assert set(row) == set(PREDICTIONS)
    assert (row["step_ms"], row["steps"], row["compute_ms"]) == (3000.0, 15, 1500.0)
    # 1 s, then 0.25 + 2 + 0.25 s, then 0.5 s.
    assert row["predicted_ms"] == pytest.approx(4000.0, rel=1e-3)
    # 100 Mbit/s instead: 2 MB take 0.18 s.
    assert row["formula_ms"] == pytest.approx(2180.0, rel=1e-2)
    assert row["other_cores"] == 0.2


def test_local_steps_share_their_average() -> None:
    recording = Recording("mean", (Submitted(("p",), (((Call(ALL_REDUCE, 10**6),),),)),))
    known = Known()
    *_, row = [known.add(result) for result in results("every(4)", recording)]
    assert row is not None
    assert row["predicted_ms"] == pytest.approx(1750.0, rel=1e-3)


# --- The page -------------------------------------------------------------------------------------


def add(path: Path, method: str, step_ms: float, predicted_ms: float, **other: object) -> None:
    row = {"hosts": 2, "ranks": 1, "mbit": 100, "delay_us": 500, "model": "mlp", "batch": 16}
    row |= {"method": method, "levels": 1, "step_ms": step_ms, "predicted_ms": predicted_ms}
    row |= {"formula_ms": predicted_ms, "date": "2026-01-02T03:04:05Z", **other}
    Table(path / "predict.csv", PREDICTIONS).add(dict.fromkeys(PREDICTIONS, "") | row)


def goals(path: Path) -> list[list[str]]:
    rows = report_prediction.latest(path / "predict.csv")
    return report_prediction.goals(rows, report_prediction.groups(rows))


def test_a_group_is_named_by_its_link_its_model_and_unusual_batches(tmp_path: Path) -> None:
    for batch in (16, 128):
        add(tmp_path, BF16, 100, 110, batch=batch)
        add(tmp_path, TOPK, 100, 110, batch=batch)
    found = report_prediction.groups(report_prediction.latest(tmp_path / "predict.csv"))
    assert [group.name.partition("us, ")[2] for group in found] == ["mlp", "mlp, 128 images"]


def test_errors_and_their_percentiles(tmp_path: Path) -> None:
    for number in range(10):
        add(tmp_path, TOPK, 100, 101 + number, mbit=number)
    rows = report_prediction.latest(tmp_path / "predict.csv")
    errors = report_prediction.errors(rows)
    assert errors == pytest.approx([0.01 * each for each in range(1, 11)])
    assert report_prediction.percentile(errors, 0.9) == pytest.approx(0.09)
    assert report_prediction.percentile(errors, 1.0) == pytest.approx(0.1)


@pytest.mark.parametrize(("topk", "reached"), [(105, True), (106, False)])
def test_the_chosen_method_is_close_to_the_best(topk: int, reached: bool, tmp_path: Path) -> None:
    add(tmp_path, BF16, 100, 110)
    add(tmp_path, TOPK, topk, 100)
    # Local steps take no part.
    add(tmp_path, "every(4)", 10, 10)
    assert (goals(tmp_path)[3][2] == "yes") == reached


def test_when_nothing_beats_the_bf16_hook(tmp_path: Path) -> None:
    times = {  # measured and predicted time of TopK; those of the bf16 hook are 100
        1: (120, 130),  # said and true
        2: (80, 130),  # said and not true
        3: (102, 90),  # true and not said, a draw
        4: (50, 60),  # neither
    }
    for mbit, (measured, predicted) in times.items():
        add(tmp_path, BF16, 100, 100, mbit=mbit)
        add(tmp_path, PLAIN, 10, 10, mbit=mbit)
        add(tmp_path, TOPK, measured, predicted, mbit=mbit)
    found = report_prediction.dont(
        report_prediction.groups(report_prediction.latest(tmp_path / "predict.csv"))
    )
    assert (found.right, found.wrong, found.missed) == (1, 1, 1)
    assert (found.draws_wrong, found.draws_missed) == (0, 1)
    assert (found.precision, found.recall) == (0.5, 0.5)
    assert (found.precision_without_draws, found.recall_without_draws) == (0.5, 1.0)


def test_the_last_row_of_a_set_up_counts(tmp_path: Path) -> None:
    add(tmp_path, TOPK, 100, 200)
    add(tmp_path, TOPK, 100, 101)
    assert goals(tmp_path)[1][1] == "1.0%"


def test_a_page_has_every_row_and_every_loss(tmp_path: Path) -> None:
    assert "Not measured yet" in report_prediction.page(tmp_path)
    add(tmp_path, BF16, 100, 110)
    add(tmp_path, TOPK, 150, 100)
    page = report_prediction.page(tmp_path)
    assert "1.50 **lost**" in page
    assert f"| `{TOPK}` | 150.0 | 100.0 | -33.3% |" in page


def test_the_committed_page_matches_its_rows() -> None:
    assert report_prediction.PAGE.read_text() == report_prediction.page(report_prediction.RESULTS)


def test_a_picture_has_a_line_for_each_method() -> None:
    pytest.importorskip("matplotlib")
    lines = {method: [0.5] * len(utilisation.GBITS) for method in (PLAIN, BF16, TOPK)}
    (axes,) = utilisation.draw(lines, "title").axes
    assert sorted(line.get_label() for line in axes.lines) == sorted(
        ["plain DDP", "DDP's bf16 hook", TOPK]
    )
