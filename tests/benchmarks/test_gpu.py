"""make gpu: it says what is missing, and a rehearsal on the CPU runs its tests and benchmarks."""

import csv
import math
import re
import runpy
import sys
import time

import pytest
import torch

from benchmarks import tables
from benchmarks.gpu import methods, profile, summary, training
from benchmarks.gpu.__main__ import PARTS, main
from benchmarks.gpu.models import TASKS
from benchmarks.net.names import BASELINES
from tests.support.cases import thorough
from tests.support.commands import ROOT, run
from tests.support.threads import torch_threads

SOME = " or ".join(["frames", "allgather and 8", "swap", "overflow", "test_without_set_device"])


def rehearse(monkeypatch, out, *arguments):
    """Run the benchmarks in this process; return their rows."""
    monkeypatch.setattr(sys, "argv", ["gpu", "--rehearse", "--out", str(out), *arguments])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with torch_threads(1):
        main()
    with (out / "gpu-rehearsal.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_without_a_gpu_it_says_what_is_missing_and_succeeds(tmp_path):
    absent = str(tmp_path / "python")
    command = [sys.executable, "tools/gpu.py", "--python", absent, sys.executable]
    done = run(command, CUDA_VISIBLE_DEVICES="")
    assert done.stdout.count("\n") == 1
    assert f"{absent}: " in done.stdout
    assert f"{sys.executable}: torch {torch.__version__} " in done.stdout
    assert done.stderr == ""


def test_a_hung_command_is_stopped_with_its_children_and_its_output_is_kept():
    watched = runpy.run_path(str(ROOT / "tools" / "gpu.py"))["watched"]
    start = time.monotonic()
    status, output = watched(["sh", "-c", "echo begun; sleep 600 & sleep 600"], 1.0, {})
    assert time.monotonic() - start < 60
    assert output == "begun\n"
    assert status != 0


@pytest.mark.parametrize("chosen", [SOME, *thorough(["test"])], ids=["some", "all"])
def test_tests_for_gpus_can_be_rehearsed(chosen):
    command = [sys.executable, "-m", "pytest", "-q", "tests/gpu", "-k", chosen]
    done = run(command, TORCHCOMP_REHEARSE="1")
    assert " passed" in done.stdout


def test_benchmarks_can_be_rehearsed(tmp_path, monkeypatch, capsys):
    rows = rehearse(monkeypatch, tmp_path)
    of_part = {part: [r for r in rows if r["part"] == part] for part in PARTS}
    assert len(of_part["method"]) == len(methods.METHODS)
    assert len(of_part["host"]) == len(set(training.METHODS) - set(BASELINES))
    assert {row["model"] for row in of_part["step"]} == set(TASKS)
    assert [row["what"] for row in of_part["step"]] == list(training.METHODS) * len(TASKS)
    for row in rows:
        assert math.isfinite(float(row["gpu_ms"] or row["step_ms"] or row["cpu_us"]))
        assert all(row[name] for name in ("date", "device", "torch", "cuda", "triton", "command"))
        assert row["seed"] == "0"
    measured = {row["what"] for row in (*of_part["method"], *of_part["host"])}
    assert len(tables.gpu_buckets(rows).splitlines()) == 2 + len(measured)
    assert len(tables.gpu_steps(rows).splitlines()) == 2 + len(training.METHODS)
    # The run ends with these tables, of a width that terminals have.
    printed = capsys.readouterr().out
    assert printed.endswith(shown := summary.text(rows))
    assert all(len(line) <= 80 for line in shown.splitlines())
    for method in training.METHODS:
        assert len(re.findall(rf"^{re.escape(method)} .*", shown, re.MULTILINE)) >= len(TASKS)


def test_a_profile_can_be_rehearsed(monkeypatch, capsys):
    spec = "ef(topk(0.01))"
    monkeypatch.setattr(sys, "argv", ["profile", spec, "--rehearse", "--repeats=2", "--lines=9"])
    with torch_threads(1):
        profile.main()
    printed = capsys.readouterr().out
    calls, ours, files = map(
        int, re.findall(r"bucket: (\d+), .* (\d+) of .* (\d+) files", printed)[0]
    )
    assert calls > ours > files > 0
    assert printed.startswith(f"== {spec}: ")
    assert " torchcomp/" in printed
    assert str(ROOT) not in printed
