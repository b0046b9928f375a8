"""The benchmark of the kernels on the CPU runs, on small vectors."""

import csv
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import encode

RESULTS = Path(encode.__file__).parent / "results"


def test_encode_measures_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "encode.csv"
    words = ["--sizes", "5000", "--threads", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["encode", *words])
    # The number of threads would stay changed for all later tests of this process.
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    encode.main()
    with out.open(newline="") as file:
        measured = list(csv.DictReader(file))
    with (RESULTS / "encode.csv").open(newline="") as file:
        committed = {row["what"] for row in csv.DictReader(file)}
    assert {row["what"] for row in measured} <= committed
    assert {"encode cold", "encode warm", "decode 8", "add + torch.topk", "floor"} <= {
        row["what"] for row in measured
    }
    # 0.1, 1 and 10 % of 5000.
    assert {row["k"] for row in measured} == {"5", "50", "500"}
    assert all(float(row["ms"]) > 0 for row in measured)
