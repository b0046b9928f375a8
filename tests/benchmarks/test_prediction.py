"""benchmarks/predict.py without shaped hosts."""

import json
from dataclasses import asdict

import pytest

from benchmarks.net.predicted import Known
from benchmarks.net.rows import PREDICTIONS
from torchcomp.advisor import CollectiveTimes, Compute
from torchcomp.advisor.collectives import ALL_REDUCE, ALL_TO_ALL, Point
from torchcomp.advisor.simulation import Call, Recording, Submitted, Work

TOPK = "ef(topk(0.01))"
COMMON = {"date": "2026-01-02", "revision": "0", "torch": "2", "device": "cpu", "cpus": 2}
COMMON |= {"batch": 16, "setup": {"hosts": 2, "ranks": 1, "mbit": 100, "delay_us": 500}}


def results(method, recording):
    """What a job of two ranks reports: 1 s of backward pass, 0.5 s of optimizer, 1 s per MB."""
    curve = (Point(1, 1e-6), Point(10**6, 1.0))
    link = CollectiveTimes(2, {ALL_REDUCE: curve, ALL_TO_ALL: curve})
    compute = Compute((("p",),), (1.0,), 1.0, 1.5)
    computed = {"compute": asdict(compute), "wall": 4.0, "busy": 8.0, "worked": 4.0}
    labels = {**COMMON, "model": "mlp", "parameters": 5, "method": method, "levels": 1}
    step = {"times": [3.0, 4.0, 3.0], "length": 5, "wall": 10.0, "busy": 12.0, "worked": 5.0}
    parts = [
        {"what": "link", **COMMON, "ranks": [link.to_dict()] * 2},
        {"what": "compute", **labels, "ranks": [computed] * 2},
        {"what": "recording", **labels, "ranks": [asdict(recording)] * 2},
        {"what": "step", **labels, "ranks": [step] * 2},
    ]
    return [json.loads(json.dumps(part)) for part in parts]


def test_a_row_compares_the_prediction_with_the_measured_step():
    activities = (Work(0.25), Call(ALL_REDUCE, 2 * 10**6), Work(0.25))
    recording = Recording(TOPK, (Submitted(("p",), activities),))
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
