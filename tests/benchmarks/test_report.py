"""docs/performance.md says what the CSV files say, and the report can be made of any of them."""

import csv
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
    """The report, its results and its document, where a test may change them."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=ignore)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def test_the_document_is_what_the_csv_files_say() -> None:
    checked = run("--check")
    assert checked.returncode == 0, checked.stderr


def test_a_changed_number_is_noticed(copied: Path) -> None:
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
    assert "is not what the CSV files say" in checked.stderr


@pytest.mark.thorough
def test_a_missing_picture_is_noticed(copied: Path) -> None:
    assert run(root=copied).returncode == 0
    assert run("--check", root=copied).returncode == 0
    (copied / "docs" / "performance" / "bytes.png").unlink()
    checked = run("--check", root=copied)
    assert checked.returncode == 1
    assert "bytes.png" in checked.stderr


def test_the_pictures_that_the_document_shows_exist() -> None:
    shown = list((ROOT / "docs/performance.md").read_text().splitlines())
    pictures = [line.split("](")[1].rstrip(")") for line in shown if line.startswith("![")]
    assert pictures
    assert all((ROOT / "docs" / picture).is_file() for picture in pictures)


def test_a_report_without_any_results_says_so(copied: Path) -> None:
    shutil.rmtree(copied / "benchmarks" / "results")
    made = run(root=copied)
    assert made.returncode == 0, made.stderr
    assert "Nothing has been measured yet" in (copied / "docs" / "performance.md").read_text()
