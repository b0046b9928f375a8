"""docs/performance.md matches the CSV files, and the report works with any of them missing."""

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE

ROOT = Path(__file__).parents[2]


def run(*arguments: str, root: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.report", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PATIENCE)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of benchmarks/ and docs/, and of what they need, that a test can change."""
    ignore = shutil.ignore_patterns("__pycache__", "configs", "results")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes", ignore=ignore)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=ignore)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def test_the_page_matches_the_csv_files() -> None:
    checked = run("--check")
    assert checked.returncode == 0, checked.stderr


FRONT_PAGE = {
    "plain DDP": "ddp",
    "DDP with PyTorch's bf16 hook": "bf16",
    "DDP with PyTorch's PowerSGD hook, rank 1": "powersgd-1",
    'ef(topk(0.01, values="int8"))': 'ef(topk(0.01, values="int8"))',
    'bidirectional(topk(0.01, values="int8"), topk(0.01, values="int8"))': (
        'bidirectional(topk(0.01, values="int8"), topk(0.01, values="int8"), selection="shard")'
    ),
    "no exchange at all (lower bound)": "no-op",
}


def test_the_front_page_has_the_measured_times() -> None:
    with (ROOT / "benchmarks" / "results" / "network.csv").open(newline="") as file:
        measured = {
            (row["method"], row["mbit"]): f"{float(row['step_ms']):,.0f}"
            for row in csv.DictReader(file)
            if (row["model"], row["hosts"]) == ("resnet18", "4")
        }
    lines = (ROOT / "README.md").read_text().splitlines()
    start = lines.index("| | 100 Mbit/s | 1 Gbit/s |") + 2
    found = [re.sub("[`*]", "", line).strip("| ").split(" | ") for line in lines[start:]]
    shown = {cells[0]: tuple(cells[1:]) for cells in found[: len(FRONT_PAGE)]}
    assert shown == {
        label: (measured[method, "100"], measured[method, "1000"])
        for label, method in FRONT_PAGE.items()
    }


def test_a_changed_number_is_found(copied: Path) -> None:
    path = copied / "benchmarks" / "results" / "network.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows[-1]["payload_bytes"] = "123456789"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    checked = run("--check", root=copied)
    assert checked.returncode == 1
    assert "docs/performance.md" in checked.stderr


@pytest.mark.thorough
def test_a_missing_plot_is_found(copied: Path) -> None:
    assert run(root=copied).returncode == 0
    assert run("--check", root=copied).returncode == 0
    (copied / "docs" / "performance" / "bytes.png").unlink()
    checked = run("--check", root=copied)
    assert checked.returncode == 1
    assert "bytes.png" in checked.stderr


def test_the_plots_of_the_page_exist() -> None:
    lines = (ROOT / "docs/performance.md").read_text().splitlines()
    plots = [line.split("](")[1].rstrip(")") for line in lines if line.startswith("![")]
    assert plots
    assert all((ROOT / "docs" / plot).is_file() for plot in plots)


@pytest.mark.thorough
def test_a_report_without_results_has_no_tables_of_them(copied: Path) -> None:
    shutil.rmtree(copied / "benchmarks" / "results")
    made = run(root=copied)
    assert made.returncode == 0, made.stderr
    page = (copied / "docs" / "performance.md").read_text()
    assert page.startswith("# Performance")
    assert "resnet18" not in page
