"""The benchmarks of the kernels run, on small vectors."""

import csv
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    # The number of threads would stay changed for all later tests of this process.
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    runpy.run_path(str(BENCHMARKS / name), run_name="__main__")


def test_encode_measures_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "encode.csv"
    run(monkeypatch, "encode.py", "--sizes", "5000", "--threads", "1", "--out", str(out))
    with out.open(newline="") as file:
        measured = list(csv.DictReader(file))
    with (BENCHMARKS / "results" / "encode.csv").open(newline="") as file:
        committed = {row["what"] for row in csv.DictReader(file)}
    assert {row["what"] for row in measured} == committed
    # 0.1, 1 and 10 % of 5000.
    assert {row["k"] for row in measured} == {"5", "50", "500"}
    assert all(float(row["ms"]) > 0 for row in measured)


def test_decode_prints_every_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "decode.py", "--n", "5000", "--repeats", "1")
    printed = capsys.readouterr().out
    assert re.search(r"\b8\b.*\b50\b.*\b5000\b", printed)
    assert all(name in printed for name in ("dense pass", "add up, one call", "plain torch"))
