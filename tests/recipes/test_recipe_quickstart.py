"""The quickstart's table fits a narrow terminal, its picture is drawn, its failures are told."""

import sys
from pathlib import Path
from typing import Any

import pytest

from recipes import quickstart
from recipes.quickstart import METHODS, Result, draw, table


def results(seeds: int) -> dict[str, list[Result]]:
    return {
        name: [
            result(accuracy=0.97 + 0.01 * seed, sent=10.0 ** (6 - place)) for seed in range(seeds)
        ]
        for place, name in enumerate(METHODS)
    }


def result(accuracy: float, sent: float) -> Result:
    summary: dict[str, Any] = {
        "test_accuracy": accuracy,
        "bytes_per_step": sent,
        "dense_bytes_per_step": 1e6,
        "synchronisations": 12_345,
    }
    return Result(summary, [(int(sent * step), accuracy * step / 10) for step in range(6, 11)])


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_table_fits_sixty_columns(seeds: int) -> None:
    lines = table(results(seeds)).splitlines()
    assert [line.split()[0] for line in lines] == ["method", "dense", "ef(topk(0.01))", "QSR"]
    assert max(map(len, lines)) <= 60
    assert "10.0x" in lines[2]
    assert ("±" in lines[1]) == (seeds > 1)


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_picture_is_drawn(seeds: int, tmp_path: Path) -> None:
    draw(results(seeds), tmp_path / "runs" / "accuracy.png")
    assert (tmp_path / "runs" / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_fails_or_hangs_is_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quickstart.call([sys.executable, "-c", "raise SystemExit(3)"], {}) == 3
    monkeypatch.setattr(quickstart, "_TIMEOUT_SECONDS", 0.2)
    assert quickstart.call([sys.executable, "-c", "import time; time.sleep(60)"], {}) == 1
    assert "no end after 0.2 s" in capsys.readouterr().err
