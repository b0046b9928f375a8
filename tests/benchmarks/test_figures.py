"""The pages have the figures of the committed results."""

import re
from pathlib import Path

import pytest

from benchmarks import figures, pictures, report, tables
from benchmarks.net.names import BF16, FLOOR, PLAIN

ROOT = Path(__file__).parents[2]
NAMES = {"plain DDP": PLAIN, "DDP with PyTorch's bf16 hook": BF16}
NAMES |= {"DDP with PyTorch's PowerSGD hook, rank 1": "powersgd-1"}
NAMES |= {"no exchange at all (lower bound)": FLOOR}


def test_the_front_page_has_the_measured_times():
    steps = figures.Steps(report.RESULTS / "network.csv")
    lines = (ROOT / "README.md").read_text().splitlines()
    start = lines.index("| | 100 Mbit/s | 1 Gbit/s |") + 2
    found = [re.sub("[`*]", "", line).strip("| ").split(" | ") for line in lines[start:]]
    links = [("resnet18", 4, 100), ("resnet18", 4, 1000)]
    for label, *shown in found[:6]:
        method = NAMES.get(label, label)
        assert shown == [f"{steps.milliseconds(link, method):,.0f}" for link in links]


def test_pages_and_pictures_are_written(tmp_path, monkeypatch):
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
