"""The recipe that traces a training step: what it reads from a trace, and its picture."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes import trace
from recipes.errors import RecipeError

STEP = {"name": "step", "tid": 1, "ts": 1000.0, "dur": 9000.0}
BACKWARD = {"name": "backward", "tid": 1, "ts": 2000.0, "dur": 5000.0}
OPTIMIZER = {"name": "optimizer", "tid": 1, "ts": 7000.0, "dur": 1000.0}
REDUCE = {"name": "gloo:all_reduce", "tid": 2, "ts": 3000.0, "dur": 500.0}
AVERAGE = {"name": "torchcomp::average bucket 3", "tid": 2, "ts": 2500.0, "dur": 1500.0}


def written(path: Path, *events: dict[str, Any]) -> Path:
    metadata = {"name": "process_name", "ph": "M", "tid": 0, "ts": 0}
    complete = [{"ph": "X", **event} for event in (STEP, BACKWARD, OPTIMIZER, *events)]
    path.write_text(json.dumps({"traceEvents": [metadata, *complete]}))
    return path


def test_a_trace_is_read_in_milliseconds_since_the_start_of_the_step(tmp_path: Path) -> None:
    spans = trace.read(written(tmp_path / "trace.json", AVERAGE, REDUCE))
    assert spans == [
        trace.Span("backward", None, True, 1.0, 5.0),
        trace.Span("average", 3, False, 1.5, 1.5),
        trace.Span("optimizer", None, True, 6.0, 1.0),
    ]


def test_without_torchcomp_the_collectives_of_gloo_are_the_exchange(tmp_path: Path) -> None:
    spans = trace.read(written(tmp_path / "trace.json", REDUCE))
    assert trace.Span("all_reduce", None, False, 2.0, 0.5) in spans


def test_the_picture_is_written(tmp_path: Path) -> None:
    traces = {
        "dense": trace.read(written(tmp_path / "0.json", REDUCE)),
        "ef": trace.read(written(tmp_path / "1.json", AVERAGE)),
    }
    trace.draw(traces, tmp_path / "out" / "overlap.png")
    assert (tmp_path / "out" / "overlap.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_two_ranks_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        trace.all_threads()
    except RecipeError:
        pytest.skip("this torch traces one thread only")
    flags = ["--methods", "ef(topk(0.01))", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["trace", *flags])
    trace.main()
    assert (tmp_path / "overlap.png").is_file()
    for rank in range(trace.RANKS):
        names = {span.name for span in trace.read(tmp_path / "0-ef" / f"rank{rank}.json")}
        assert {"backward", "wait", "encode", "all_gather", "decode", "average"} <= names
