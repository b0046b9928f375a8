"""The files of a run: a full disk does not end it, and a resumed run finds what is whole."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from recipes.errors import RecipeError
from recipes.report import Report


def report_in(folder: Path, done: int = 0) -> Report:
    return Report(folder, total=100, done=done, is_main=True)


def metrics_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_full_disk_does_not_end_the_run_and_is_reported_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with report_in(tmp_path) as report:
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        for step in (1, 2, 3):
            report.log_metrics(step=step)
    (line,) = capfd.readouterr().err.splitlines()
    assert "metrics.jsonl" in line
    assert "No space left on device" in line


def test_a_full_disk_at_the_start_keeps_the_metrics(tmp_path: Path) -> None:
    with report_in(tmp_path) as report:
        report.log_metrics(step=1)
    (tmp_path / ".metrics.jsonl").symlink_to("/dev/full")
    with report_in(tmp_path, done=1) as report:
        report.log_metrics(step=2)
    assert [line["step"] for line in metrics_in(tmp_path)] == [1, 2]


def test_results_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    with report_in(tmp_path) as report:
        (tmp_path / ".summary.json").symlink_to("/dev/full")
        with pytest.raises(RecipeError, match="No space left on device"):
            report.write_summary({"steps": 1})
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("line", ["\0" * 40, '{"step": 4', "[]", "7", '{"step": "two"}'])
def test_a_damaged_line_is_dropped(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n{{"step": 3}}\n')
    with report_in(tmp_path, done=2) as report:
        report.log_metrics(step=3)
    assert [line["step"] for line in metrics_in(tmp_path)] == [1, 2, 3]


def test_a_kill_at_the_start_keeps_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with report_in(tmp_path) as report:
        report.log_metrics(step=1)

    def die(*paths: Path) -> None:
        raise SystemExit

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(SystemExit):
        report_in(tmp_path, done=1)
    assert metrics_in(tmp_path) == [{"step": 1}]
