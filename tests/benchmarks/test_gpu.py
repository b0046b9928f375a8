"""make gpu: it says what is missing, and a rehearsal on the CPU runs its tests and benchmarks."""

import csv
import math
import re
import runpy
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import report_gpu
from benchmarks.gpu import methods, profile, summary, training
from benchmarks.gpu.__main__ import COLUMNS, PARTS, main
from benchmarks.gpu.device import WAIT, counted_waits
from benchmarks.gpu.models import TASKS
from benchmarks.net.methods import in_ddp
from benchmarks.net.names import BASELINES, PLAIN, POWERSGD
from benchmarks.net.rows import Table
from tests.gpu.compiler import c_compiler
from tests.gpu.place import on_ranks
from tests.support.cases import thorough
from tests.support.commands import ROOT, run
from tests.support.threads import torch_threads

SOME = " or ".join(["frames", "allgather and 8", "swap", "overflow", "test_without_set_device"])


def rehearse(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> list[dict[str, str]]:
    """Run the benchmarks in this process; return their rows."""
    monkeypatch.setattr(sys, "argv", ["gpu", "--rehearse", "--out", str(out), *arguments])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with torch_threads(1):
        main()
    with (out / "gpu-rehearsal.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# --- Without a GPU --------------------------------------------------------------------------------


def test_without_a_gpu_it_says_what_is_missing_and_succeeds(tmp_path: Path) -> None:
    absent = str(tmp_path / "python")
    command = [sys.executable, "tools/gpu.py", "--python", absent, sys.executable]
    done = run(command, CUDA_VISIBLE_DEVICES="")
    assert done.stdout.count("\n") == 1
    assert f"{absent}: " in done.stdout
    assert f"{sys.executable}: torch {torch.__version__} " in done.stdout
    assert done.stderr == ""


def test_make_gpu_needs_no_environment() -> None:
    """Without a GPU, it installs nothing and succeeds."""
    done = run(["make", "gpu", f"PYTHON={sys.executable}"], CUDA_VISIBLE_DEVICES="")
    assert sys.executable in done.stdout


def test_a_page_without_rows_says_that_no_gpu_has_run_it(tmp_path: Path) -> None:
    assert "No GPU" in report_gpu.text(tmp_path)
    assert report_gpu.sections(tmp_path) == report_gpu.goals(tmp_path) == []


def test_a_hung_command_is_stopped_with_its_children_and_its_output_is_kept() -> None:
    watched = runpy.run_path(str(ROOT / "tools" / "gpu.py"))["watched"]
    start = time.monotonic()
    status, output = watched(["sh", "-c", "echo begun; sleep 600 & sleep 600"], 1.0, {})
    assert time.monotonic() - start < 60
    assert output == "begun\n"
    assert status != 0


def test_tests_for_which_no_time_is_left_are_named_and_have_not_failed() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "gpu.py"))
    failed, left_out = tool["tested"](sys.executable, True, 0.0)
    assert failed == []
    assert left_out == tool["TESTS"]


def test_the_files_that_take_longest_start_first() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "gpu.py"))
    longest = tool["LONGEST"]
    assert tool["TESTS"][: len(longest)] == list(longest)
    assert min(longest.values()) > tool["FILE_SECONDS"]


def test_ranks_may_take_what_is_left_for_their_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHCOMP_DEADLINE", str(time.monotonic()))
    with pytest.raises(TimeoutError):
        on_ranks(1, time.sleep, 20, start="forkserver")


def test_triton_finds_the_compiler_that_is_named_or_gcc_or_clang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert c_compiler() is None
    for name in ("clang", "gcc"):
        (tmp_path / name).touch(mode=0o755)
        assert c_compiler() == str(tmp_path / name)
    monkeypatch.setenv("CC", "clang")
    assert c_compiler() == str(tmp_path / "clang")
    monkeypatch.setenv("CC", "absent")
    assert c_compiler() is None


# --- A rehearsal ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [SOME, *thorough(["test"])], ids=["some", "all"])
def test_tests_for_gpus_can_be_rehearsed(chosen: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "tests/gpu", "-k", chosen]
    done = run(command, TORCHCOMP_REHEARSE="1")
    assert " passed" in done.stdout


def test_benchmarks_can_be_rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    # Every table of the page has its rows.
    tables = report_gpu.sections(tmp_path)
    assert [len(cells) for _, _, cells in tables] == [
        len(of_part["kernel"]),
        len(of_part["method"]),
        len(of_part["host"]),
        *[len(training.METHODS)] * len(TASKS),
    ]
    assert all(len(line) == len(heads) for _, heads, cells in tables for line in cells)
    # The run ends with these tables, of a width that terminals have.
    printed = capsys.readouterr().out
    assert printed.endswith(shown := summary.text(rows))
    assert all(len(line) <= 80 for line in shown.splitlines())
    for method in training.METHODS:
        assert len(re.findall(rf"^{re.escape(method)} .*", shown, re.MULTILINE)) >= len(TASKS)


def test_a_profile_can_be_rehearsed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_ddp_has_no_broadcasts_with_the_options_of_any_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.6 has no init_sync, and names the option for buffers as older versions do."""
    given: list[dict[str, Any]] = []

    class Old:
        def __init__(self, module: Any, broadcast_buffers: bool = True, **options: Any) -> None:
            self.broadcast_buffers = broadcast_buffers
            given.append(options)

    class New(Old):
        def __init__(self, module: Any, init_sync: bool = True, **options: Any) -> None:
            super().__init__(module, init_sync=init_sync, **options)

    for kind in (Old, New):
        monkeypatch.setattr("benchmarks.net.methods.DistributedDataParallel", kind)
        assert in_ddp(nn.Linear(1, 1)).broadcast_buffers is False
    assert [options.get("init_sync") for options in given] == [None, False]


def test_what_the_time_does_not_allow_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--rehearse", "--out", str(tmp_path), "--minutes=0"])
    with torch_threads(1):
        main()
    printed = capsys.readouterr().out
    assert all(f"step {model}" in printed for model in TASKS)
    assert list(tmp_path.iterdir()) == []


def test_waits_are_counted_by_line() -> None:
    """As torch warns of them. Other warnings are not counted."""
    with counted_waits("cpu") as lines:
        for _ in range(3):
            warnings.warn(f"{WAIT} (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert len(lines) == 3
    assert len(set(lines)) == 1
    assert lines[0].startswith(f"{__file__}:")


# --- The page and the models ----------------------------------------------------------------------


def test_the_latest_row_of_a_measurement_counts(tmp_path: Path) -> None:
    table = Table(tmp_path / "gpu-some-gpu.csv", COLUMNS)
    common = dict.fromkeys(COLUMNS, "") | {"device": "Some GPU", "part": "kernel", "form": "fast"}
    common |= {"what": "encode warm", "n": 25_000_000, "floor_ms": "1.0", "gb_s": "1"}
    for k, milliseconds in ((250_000, 2.0), (25_000, 9.0), (250_000, 1.5)):
        table.add(common | {"k": k, "gpu_ms": str(milliseconds)})
    ((_, _, cells),) = report_gpu.sections(tmp_path)
    assert [line[-1] for line in cells] == ["1.50", "9.00"]
    # The goal is about 1 % only.
    ((_, goal, measured, met),) = report_gpu.goals(tmp_path)
    assert "Some GPU" in goal
    assert (measured, met) == ("1.50", True)


def test_steps_are_compared_with_the_goals(tmp_path: Path) -> None:
    table = Table(tmp_path / "gpu-some-gpu.csv", COLUMNS)
    common = dict.fromkeys(COLUMNS, "") | {
        "device": "Some GPU",
        "part": "step",
        "model": "resnet50",
    }
    common |= {"ranks": 1, "step_ms_low": "1", "step_ms_high": "2"}
    steps = {PLAIN: 10.0, POWERSGD: 12.0, "mean": 10.2, "ef(topk(0.01))": 12.0}
    for what, milliseconds in (steps | {"powersgd(rank=1)": 11.9}).items():
        table.add(common | {"what": what, "step_ms": str(milliseconds)})
    host = {"part": "host", "what": "ef(topk(0.01))", "ranks": 8, "cpu_us": "140"}
    table.add(common | {"model": ""} | host)
    found = {(subject, measured): met for subject, _, measured, met in report_gpu.goals(tmp_path)}
    assert found == {
        ("`mean`", "1.020 ×"): True,
        ("`ef(topk(0.01))`", "1.200 ×"): False,
        ("`powersgd(rank=1)`", "0.992 ×"): True,
        ("`ef(topk(0.01))`", "140 µs"): True,
    }


@pytest.mark.parametrize("revision", ["a01cff8", "a01cff9"])
def test_rows_from_before_the_rewritten_step_are_marked(tmp_path: Path, revision: str) -> None:
    table = Table(tmp_path / "gpu-some-gpu.csv", COLUMNS)
    row = {"device": "Some GPU", "part": "host", "what": "mean", "ranks": 8, "cpu_us": "40"}
    table.add(dict.fromkeys(COLUMNS, "") | row | {"revision": revision})
    ((title, _, _),) = report_gpu.sections(tmp_path)
    assert ("rewritten" in title) == (revision == "a01cff8")


@pytest.mark.parametrize(
    ("model", "parameters"), [("resnet50", 25_557_032), ("vit_b_16", 86_567_656)]
)
def test_the_models_have_the_parameters_of_the_published_ones(model: str, parameters: int) -> None:
    with torch.device("meta"):
        built = TASKS[model].build()
    assert sum(parameter.numel() for parameter in built.parameters()) == parameters
