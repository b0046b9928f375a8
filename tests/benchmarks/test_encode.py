"""The benchmark of the kernels on the CPU runs, on small vectors."""

import csv
import sys

import torch

from benchmarks import encode


def test_encode_measures_every_part(tmp_path, monkeypatch):
    out = tmp_path / "encode.csv"
    words = ["encode", "--sizes", "5000", "--threads", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    # The number of threads would stay changed for all later tests of this process.
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    encode.main()
    measured = list(csv.DictReader(out.read_text().splitlines()))
    assert {"encode cold", "decode 8", "floor"} <= {row["what"] for row in measured}
    assert all(float(row["ms"]) > 0 for row in measured)
