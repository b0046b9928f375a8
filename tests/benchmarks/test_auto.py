"""benchmarks.auto: its page matches its rows, and it runs on shaped hosts."""

import sys
from pathlib import Path

import pytest

from benchmarks import report_auto
from benchmarks.auto import GRID, row_of
from benchmarks.report_data import read
from tests.benchmarks.test_network import probe
from tests.support.commands import run


def test_the_page_matches_the_csv_file() -> None:
    assert report_auto.PAGE.filled() == report_auto.PAGE.text


def test_the_grid_has_slow_and_fast_links() -> None:
    assert len(set(GRID)) == len(GRID)
    assert {mbit for _, mbit, _ in GRID} == {10, 100, 1000}


def test_a_row_has_the_mean_over_the_ranks_and_the_median_over_the_steps() -> None:
    ranks = [
        {"values": {"trial": 0.2, "times": times, "busy": 3.0, "worked": 1.0, "wall": 2.0}}
        for times in ([0.1, 0.2, 0.6], [0.3, 0.2, 0.2])
    ]
    result = {"model": "mlp", "parameters": 9, "method": "mean", "chosen": "mean"}
    row = row_of({**result, "trial_steps": 96, "ranks": ranks}, {"hosts": 2})
    found = [row[name] for name in ("trial_ms", "step_ms", "steps", "other_cores", "trial_steps")]
    assert found == [200.0, 200.0, 3, 0.5, 96]


@pytest.mark.thorough
def test_a_quick_run_times_each_method_in_the_trial_and_alone(tmp_path: Path) -> None:
    if reason := probe():
        pytest.skip(f"no shaped hosts here: {reason}")
    run([sys.executable, "-m", "benchmarks.auto", "--quick", "--out", tmp_path])
    rows = read(tmp_path / "auto.csv")
    assert len(rows) == 4
    assert {row["chosen"] for row in rows} <= {row["method"] for row in rows}
    assert all(float(row["trial_ms"]) > 0 and int(row["trial_steps"]) <= 100 for row in rows)
    assert "chosen" in report_auto.tables(tmp_path)
