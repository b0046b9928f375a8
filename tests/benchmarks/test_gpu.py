"""make gpu: it says what is missing, and a rehearsal on the CPU runs its tests and benchmarks."""

import csv
import math
import runpy
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks import report_gpu
from benchmarks.gpu import methods, training
from benchmarks.gpu.__main__ import COLUMNS, main
from benchmarks.gpu.device import WAIT, counted_waits
from benchmarks.gpu.models import TASKS
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


def test_benchmarks_can_be_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rehearse(monkeypatch, tmp_path)
    of_part = {
        part: [r for r in rows if r["part"] == part] for part in ("kernel", "method", "step")
    }
    assert len(of_part["method"]) == len(methods.METHODS)
    assert {row["model"] for row in of_part["step"]} == set(TASKS)
    assert [row["what"] for row in of_part["step"]] == list(training.METHODS) * len(TASKS)
    for row in rows:
        assert math.isfinite(float(row["gpu_ms"] or row["step_ms"]))
        assert all(row[name] for name in ("date", "device", "torch", "cuda", "triton", "command"))
        assert row["seed"] == "0"
    # Every table of the page has its rows.
    tables = report_gpu.sections(tmp_path)
    assert [len(cells) for _, _, cells in tables] == [
        len(of_part["kernel"]),
        len(of_part["method"]),
        *[len(training.METHODS)] * len(TASKS),
    ]
    assert all(len(line) == len(heads) for _, heads, cells in tables for line in cells)


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


@pytest.mark.parametrize(
    ("model", "parameters"), [("resnet50", 25_557_032), ("vit_b_16", 86_567_656)]
)
def test_the_models_have_the_parameters_of_the_published_ones(model: str, parameters: int) -> None:
    with torch.device("meta"):
        built = TASKS[model].build()
    assert sum(parameter.numel() for parameter in built.parameters()) == parameters
