"""Tables and goals of several ranks behind each link, from rows with chosen values."""

from pathlib import Path

import pytest

from benchmarks import report_nodes
from benchmarks.net.rows import NODES, Table

TOPK = "ef(topk(0.01))"


def add(path: Path, method: str, levels: int, step_ms: float, link: int, **other: object) -> None:
    row = {"model": "resnet18", "hosts": 2, "ranks": 4, "mbit": 100, "batch": 16, "cpus": 2}
    row |= {"method": method, "levels": levels, "step_ms": step_ms, "payload_bytes": link}
    row |= {"inside_bytes": 0, "date": "2026-01-02T03:04:05Z", **other}
    Table(path, NODES).add(dict.fromkeys(NODES, "") | row)


def met(path: Path) -> list[tuple[str, bool]]:
    return [(method, met) for method, _, _, met in report_nodes.goals(path)]


@pytest.mark.parametrize(("link", "reached"), [(270, True), (271, False)])
def test_the_goal_of_bytes(link: int, reached: bool, tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    add(path, TOPK, 1, 50, 1000)
    add(path, TOPK, 2, 50, link)
    assert met(path) == [(f"`{TOPK}`", reached)]


def test_one_missed_shape_misses_the_goal_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    for model, link in (("resnet18", 100), ("smallcnn", 400)):
        add(path, TOPK, 1, 50, 1000, model=model)
        add(path, TOPK, 2, 50, link, model=model)
    ((_, _, measured, reached),) = report_nodes.goals(path)
    assert not reached
    assert "0.100" in measured
    assert "0.400" in measured


# 10 ms are `no-op`'s. A shorter step is noise, and reaches no goal.
@pytest.mark.parametrize(("step_ms", "reached"), [(30, True), (31, False), (9, False)])
def test_the_goal_of_time(step_ms: float, reached: bool, tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    # Two ranks a node, so the goal of bytes does not apply. `no-op` is in both launches.
    for levels in (1, 2):
        add(path, "no-op", levels, 10, 0, ranks=2)
    add(path, TOPK, 1, 50, 1000, ranks=2)
    add(path, TOPK, 2, step_ms, 1000, ranks=2)
    assert met(path) == [(f"`{TOPK}`", reached)]


@pytest.mark.parametrize(("step_ms", "reached"), [(20, True), (21, False), (9, False)])
def test_the_goal_against_the_bf16_hook(step_ms: float, reached: bool, tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    add(path, "no-op", 1, 10, 0, mbit=1000)
    add(path, "bf16", 1, 50, 1000, mbit=1000)
    add(path, TOPK, 2, step_ms, 10, mbit=1000)
    assert met(path) == [(f"`{TOPK}`", reached)]


def test_a_table_compares_both_levels_with_both_baselines(tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    add(path, TOPK, 2, 20, 100, inside_bytes=1234)
    add(path, TOPK, 1, 50, 500)
    add(path, "bf16", 1, 80, 1000)
    add(path, "ddp", 1, 160, 2000)
    ((heads, rows),) = report_nodes.tables(path)
    assert heads[1:] == ["levels", "link, bytes", "inside, bytes", "100 Mbit/s"]
    assert rows == [
        ["`ddp`", "1", "2,000 (1.0000, 2.0000)", "0", "160.0 (1.000, 2.000)"],
        ["`bf16`", "1", "1,000 (0.5000, 1.0000)", "0", "80.0 (0.500, 1.000)"],
        [f"`{TOPK}`", "1", "500 (0.2500, 0.5000)", "0", "50.0 (0.312, 0.625)"],
        [f"`{TOPK}`", "2", "100 (0.0500, 0.1000)", "1,234", "20.0 (0.125, 0.250)"],
    ]


def test_a_later_row_replaces_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    for link in (500, 100):
        add(path, TOPK, 2, 20, link)
    ((_, rows),) = report_nodes.tables(path)
    assert rows[0][2].startswith("100 ")
