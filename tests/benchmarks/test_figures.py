"""The figures of the pages, from rows with chosen values; and that the pages have theirs."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figures, pictures, report, tables
from benchmarks.net.names import BF16, FLOOR, PLAIN

ROOT = Path(__file__).parents[2]
TOPK = "ef(topk(0.01))"


def write(path: Path, *rows: dict[str, Any]) -> Path:
    """Write rows; a column that a row lacks is empty."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    return path


# --- Steps ----------------------------------------------------------------------------------------


def step(method: str, step_ms: float, mbit: int = 100, **other: object) -> dict[str, Any]:
    row = {"model": "resnet18", "hosts": 4, "mbit": mbit, "method": method, "step_ms": step_ms}
    return row | {"user_ms": 0, "system_ms": 0, "payload_bytes": 8, "counted_bytes": ""} | other


def test_a_step_is_compared_with_the_latest_row_of_plain_ddp_on_its_link(tmp_path: Path) -> None:
    rows = [step(PLAIN, 50), step(PLAIN, 80), step(PLAIN, 999, mbit=10), step(TOPK, 20)]
    steps = figures.Steps(write(tmp_path / "network.csv", *rows))
    assert steps.milliseconds(("resnet18", 4, 100), PLAIN) == 80
    assert steps.relative(("resnet18", 4, 100), TOPK) == 0.25
    assert steps.relative(("resnet18", 4, 10), TOPK) is None


def test_a_step_is_split_at_the_median_of_no_exchange_on_all_links(tmp_path: Path) -> None:
    idle = [
        step(FLOOR, ms, mbit, user_ms=6, system_ms=2) for ms, mbit in ((9, 10), (10, 100), (30, 1))
    ]
    own = step(TOPK, 40, user_ms=13, system_ms=5)
    steps = figures.Steps(write(tmp_path / "network.csv", *idle, own))
    assert steps.split(("resnet18", 4, 100), TOPK) == figures.Split(10, 7, 3, 20)


def test_bytes_are_the_median_over_the_speeds(tmp_path: Path) -> None:
    rows = [step(TOPK, 1, mbit, payload_bytes=n) for mbit, n in ((10, 7), (100, 9), (1000, 90))]
    steps = figures.Steps(write(tmp_path / "network.csv", *rows))
    assert steps.nbytes("payload_bytes", "resnet18", 4, TOPK) == 9
    assert steps.nbytes("counted_bytes", "resnet18", 4, TOPK) is None


def test_a_default_that_rows_write_out_is_the_same_method(tmp_path: Path) -> None:
    spec = "bidirectional(topk(0.1), topk(0.1)"
    rows = [step(f'{spec}, selection="shard")', 10), step(f"{spec})", 20)]
    steps = figures.Steps(write(tmp_path / "network.csv", *rows))
    assert steps.methods == [f"{spec})"]
    assert steps.milliseconds(("resnet18", 4, 100), f"{spec})") == 20


def test_loopback_ratios_are_those_of_a_round(tmp_path: Path) -> None:
    times = ((PLAIN, 10), ("mean", 11), (PLAIN, 20), ("mean", 19), (PLAIN, 30))
    path = write(tmp_path / "loopback.csv", *(step(method, ms, 0) for method, ms in times))
    assert figures.loopback_ratios(path)["mean"] == [1.1, 0.95]


def test_the_best_learning_rate_misses_the_fewest_runs_and_is_then_the_fastest(
    tmp_path: Path,
) -> None:
    def runs(mbit: int, rate: float, reached: str, *seconds: int) -> list[dict[str, Any]]:
        common = {"mbit": mbit, "method": TOPK, "rate": rate, "steps": 4, "reached": reached}
        return [common | {"seed": seed, "seconds": each} for seed, each in enumerate(seconds)]

    slow = [*runs(10, 0.1, "False", 1, 1, 1), *runs(10, 0.2, "True", 7, 9, 8)]
    fast = [*runs(100, 0.1, "True", 4, 4, 4), *runs(100, 0.2, "True", 3, 3, 3)]
    found = figures.times_to_accuracy(write(tmp_path / "time.csv", *slow, *fast))
    assert [(each.mbit, each.seconds, each.missed) for each in found] == [(10, 8, 0), (100, 3, 0)]


# --- Predictions ----------------------------------------------------------------------------------


def compared(method: str, step_ms: float, predicted_ms: float, **other: object) -> dict[str, Any]:
    row = {"hosts": 2, "ranks": 1, "mbit": 100, "delay_us": 500, "model": "mlp", "batch": 16}
    row |= {"method": method, "levels": 1, "step_ms": step_ms, "predicted_ms": predicted_ms}
    return row | {"formula_ms": predicted_ms} | other


def test_errors_and_their_percentiles(tmp_path: Path) -> None:
    rows = [compared(TOPK, 100, 999, mbit=0)]  # of which the last row counts
    rows += [compared(TOPK, 100, 101 + number, mbit=number) for number in range(10)]
    errors = figures.errors(figures.predictions(write(tmp_path / "predict.csv", *rows)))
    assert errors == pytest.approx([0.01 * each for each in range(1, 11)])
    assert figures.percentile(errors, 0.9) == pytest.approx(0.09)
    assert figures.percentile(errors, 1.0) == pytest.approx(0.1)


def test_a_choice_is_compared_with_the_fastest_gradient_method(tmp_path: Path) -> None:
    rows = [compared(BF16, 100, 110), compared(TOPK, 106, 100), compared("every(4)", 10, 10)]
    rows += [compared(BF16, 100, 110, batch=64)]  # nothing to choose from
    (choice,) = figures.choices(figures.predictions(write(tmp_path / "predict.csv", *rows)))
    assert choice.fastest(figures.predicted) == TOPK
    assert choice.regret == 1.06


def test_when_nothing_beats_the_bf16_hook(tmp_path: Path) -> None:
    times = {  # measured and predicted time of TopK; those of the bf16 hook are 100
        1: (120, 130),  # said and true
        2: (80, 130),  # said and not true
        3: (102, 90),  # true and not said
        4: (50, 60),  # neither
    }
    rows = []
    for mbit, (measured, predicted) in times.items():
        rows += [compared(BF16, 100, 100, mbit=mbit), compared(PLAIN, 10, 10, mbit=mbit)]
        rows += [compared(TOPK, measured, predicted, mbit=mbit)]
    found = figures.choices(figures.predictions(write(tmp_path / "predict.csv", *rows)))
    assert figures.dont(found) == (1, 1, 1)


# --- Pages ----------------------------------------------------------------------------------------

FRONT_PAGE = {
    "plain DDP": PLAIN,
    "DDP with PyTorch's bf16 hook": BF16,
    "DDP with PyTorch's PowerSGD hook, rank 1": "powersgd-1",
    'ef(topk(0.01, values="int8"))': 'ef(topk(0.01, values="int8"))',
    'bidirectional(topk(0.01, values="int8"), topk(0.01, values="int8"))': (
        'bidirectional(topk(0.01, values="int8"), topk(0.01, values="int8"))'
    ),
    "no exchange at all (lower bound)": FLOOR,
}


def test_the_front_page_has_the_measured_times() -> None:
    steps = figures.Steps(report.RESULTS / "network.csv")
    lines = (ROOT / "README.md").read_text().splitlines()
    start = lines.index("| | 100 Mbit/s | 1 Gbit/s |") + 2
    found = [re.sub("[`*]", "", line).strip("| ").split(" | ") for line in lines[start:]]
    shown = {cells[0]: cells[1:] for cells in found[: len(FRONT_PAGE)]}
    links = [("resnet18", 4, 100), ("resnet18", 4, 1000)]
    assert shown == {
        label: [f"{steps.milliseconds(link, method):,.0f}" for link in links]
        for label, method in FRONT_PAGE.items()
    }


def test_pages_and_pictures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for name in report.PAGES:
        (tmp_path / name).write_text((report.DOCS / name).read_text())
    monkeypatch.setattr(report, "DOCS", tmp_path)
    monkeypatch.setattr("sys.argv", ["report"])
    report.main()
    for name in report.PAGES:
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text()
    assert {path.name for path in (tmp_path / "performance").iterdir()} == set(pictures.PICTURES)
    marks = "".join((ROOT / "docs" / name).read_text() for name in report.PAGES)
    assert set(re.findall(r"table: benchmarks/(\w+)", marks)) == set(tables.TABLES)
