"""The shared parts of the experiments: flags, tables that resume, spreads, tables of pages."""

import argparse
import importlib
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipes.errors import RecipeError
from recipes.experiments import (
    PROVENANCE,
    ExperimentParser,
    Part,
    ResultTable,
    fill,
    run_parts,
    tuning_seeds,
)
from recipes.page_tables import filled, pages
from recipes.pictures import Line, Panel, draw, spreads
from recipes.result_files import read_csv, read_notes
from recipes.rows import (
    Spread,
    best,
    build,
    by_seed,
    cells,
    columns,
    grouped,
    paired,
    read_rows,
    spread,
    where,
)
from tests.recipes.forked_ranks import RECIPES

HOME = Path("recipes") / "work"
EXPERIMENTS = sorted(path.parent.name for path in RECIPES.glob("*/experiment.py"))
RESULTS = sorted(path.relative_to(RECIPES) for path in RECIPES.glob("*/results/**/*.csv"))
# Their programs were part of version 0.1.0 alone.
DROPPED = {"backward.csv", "on_ranks.csv", "scaling.csv", "selection.csv"}


def read(*words):
    parser = ExperimentParser("text", HOME, ("one", "two"), seeds=(0, 1), quick_seeds=(0,))
    parsed = parser.read(words)
    return parsed, parser.output_folder(parsed)


def test_other_seeds_do_not_overwrite_the_published_results():
    for words, seeds, folder in (
        ([], (0, 1), HOME / "results"),
        (["--seeds", "0,1"], (0, 1), HOME / "results"),
        (["--seeds", "7, 3,7"], (7, 3), Path("runs/work")),
        (["--quick"], (0,), Path("runs/work-quick")),
        (["--seeds", "3", "--out", "mine"], (3,), Path("mine")),
    ):
        parsed, out = read(*words, "--only", "two", "one", "two")
        assert (parsed.seeds, out, parsed.only) == (seeds, folder, ["one", "two"])
    with pytest.raises(RecipeError, match="--quick"):
        read("--quick", "--out", str(HOME / "results"))
    for text in ("", "1,", "-1", "1.5", "a", "1;2", str(2**32)):
        with pytest.raises(RecipeError, match="--seeds"):
            read(f"--seeds={text}")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_all_experiments_have_the_same_flags(name, tmp_path):
    program = importlib.import_module(f"recipes.{name}.experiment")
    words = ["--seeds", "3,7,11", "--quick", "--resume", "--out", str(tmp_path / "new")]
    parsed = program.parse(words)
    assert parsed.seeds == (3, 7, 11)
    assert (parsed.quick, parsed.resume, parsed.out) == (True, True, tmp_path / "new")
    for flag, value in (("--seeds", "a"), ("--only", "nothing"), ("--unknown", "1")):
        with pytest.raises(RecipeError, match=flag):
            program.parse([flag, value])
    assert not parsed.out.exists()


@pytest.mark.parametrize("path", [p for p in RESULTS if p.name not in DROPPED], ids=str)
def test_published_rows_name_a_command_of_their_experiment(path):
    rows = read_csv(RECIPES / path)
    if set(PROVENANCE) - set(rows[0]):
        assert path.stem.endswith("_curves") or "command" in read_notes(RECIPES / path)
        return
    for command in {row["command"] for row in rows}:
        python, flag, module, *_ = shlex.split(command)
        assert (python, flag, module.split(".")[:2]) == ("python", "-m", ["recipes", path.parts[0]])
    known = {"seed": set(range(12)) | {*tuning_seeds((), 3)}}
    assert {int(row["seed"]) for row in rows if "seed" in row} <= known["seed"]


@pytest.mark.parametrize("page", list(pages()), ids=lambda page: f"{page.parent.name}/{page.name}")
def test_the_tables_of_the_pages_are_those_of_the_results(page):
    text = page.read_text()
    assert text == filled(text), "run python -m recipes.page_tables"


def test_a_bad_mark_is_refused():
    mark = "<!-- table: small_gpt/dense -->\n"
    bad = [f"{mark}no end", f"{mark}{mark}<!-- end -->"]
    bad += [f"{mark}<!-- end -->".replace(*each) for each in (("dense", "x"), ("small_gpt", "x"))]
    for text in bad:
        with pytest.raises(RecipeError):
            filled(text)
    assert "| 600 |" in filled(f"before\n{mark}old\n<!-- end -->\nafter")


# Tables that resume.


@dataclass(frozen=True)
class Place:
    lr: float
    method: str


@dataclass(frozen=True)
class Run:
    place: Place
    seed: int


RUNS = [Run(Place(0.1, "a"), 0), Run(Place(0.1, "b"), 0)]


def opened(folder, resume, task="a task", **more):
    return ResultTable(folder / "runs.csv", columns(Run), ("loss",), task, resume=resume, **more)


def test_a_table_measures_what_it_lacks_and_every_row_says_how(tmp_path, monkeypatch):
    measured = []

    def measure(run):
        measured.append(run)
        return "1.5", [(1, 2), (2, 3)]

    for command, runs in (("first", RUNS[:1]), ("second", RUNS)):
        monkeypatch.setattr("sys.argv", ["/private/recipes/work/experiment.py", command])
        table = opened(tmp_path, command == "second", curve=("step", "value"))
        fill(table, runs, measure)
    assert measured == RUNS
    rows = read_rows(tmp_path / "runs.csv")
    assert [build(Run, row) for row in rows] == RUNS
    module = "python -m recipes.work.experiment"
    assert [row["command"] for row in rows] == [f"{module} first", f"{module} second"]
    assert all(row["versions"] and row["date"] for row in rows)
    points = [(row["method"], row["step"]) for row in read_rows(tmp_path / "runs_curves.csv")]
    assert points == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_a_file_that_cannot_be_resumed_is_refused(tmp_path):
    opened(tmp_path, resume=False).add(RUNS[0], 1)
    path = tmp_path / "runs.csv"
    whole = path.read_bytes()
    damaged = [whole.replace(b"loss", b"accuracy"), whole + b"c", whole + b"c,2,3,4,5,6,7,8"]
    for content in (*damaged, bytes(range(128, 256)), whole.replace(b"a task", b"other")):
        path.write_bytes(content)
        with pytest.raises(RecipeError, match=r"runs\.csv"):
            opened(tmp_path, resume=True)
        assert path.read_bytes() == content


def test_all_parts_are_checked_before_the_first_one_and_a_wrong_result_ends_with_1(tmp_path):
    done = []

    def part(name, problems):
        return Part(
            lambda _: done.append(f"open {name}") or (lambda: done.append(name) or problems)
        )

    arguments = argparse.Namespace(only=["a", "b"], out=tmp_path)
    with pytest.raises(SystemExit, match="not 3"):
        run_parts(arguments, {"a": part("a", ["not 3"]), "b": part("b", [])})
    assert done == ["open a", "open b", "a", "b"]


# Rows, spreads and pictures.


def test_rows_are_typed_selected_and_grouped(tmp_path):
    (tmp_path / "a.csv").write_text("# task: x\nseed,lr,ok,name\n0,0.1,True,a\n1,0.1,False,b\n")
    rows = read_rows(tmp_path / "a.csv")
    assert rows[0] == {"seed": 0, "lr": 0.1, "ok": True, "name": "a"}
    assert where(rows, ok=False, lr=0.1) == rows[1:]
    assert list(grouped(rows, "lr", "name")) == [(0.1, "a"), (0.1, "b")]
    assert by_seed(rows, lambda row: row["lr"] * 10) == {0: 1.0, 1: 1.0}
    assert cells((RUNS[0], "x")) == (0.1, "a", 0, "x")
    # A run that diverged counts as nothing.
    accuracies = [(1, 90.0), (1, 90.0), (2, 99.0), (2, math.nan)]
    rows = [{"lr": lr, "accuracy": accuracy} for lr, accuracy in accuracies]
    assert best(rows, "lr", "accuracy") == 1
    assert best(rows, "lr", lambda row: 1, lambda row: row["lr"]) == 2


def test_spread_of_values_and_of_paired_differences():
    assert spread([1, 2, 3]) == Spread(2.0, 1.0, 3)
    assert spread([1, 2, 3]).error == pytest.approx(1 / math.sqrt(3))
    # Seeds 0 and 1 differ by 1 and 3. Only one side has seed 2.
    difference = paired({0: 2.0, 1: 5.0, 2: 9.0}, {1: 2.0, 0: 1.0})
    assert (difference.mean, difference.count) == (2.0, 2)
    assert difference.with_error() == "+2.00 ± 1.00"
    with pytest.raises(ValueError, match="seed"):
        paired({0: 1.0}, {1: 1.0})
    texts = {(1, 2, 3): "2.0 ± 1.0", (1.0,): "1.0", (-0.001,): "0.0"}
    # A small deviation does not look like none, as far as two digits more show it.
    texts |= {(1.0, 1.004): "1.002 ± 0.003", (1.0, 1.00001): "1.0 ± 0.0"}
    assert {values: spread(values).with_deviation(1) for values in texts} == texts


def test_a_picture_has_lines_and_errors(tmp_path):
    line = spreads("a", {1: spread([1, 2]), 2: spread([3])}, marker="o")
    assert (line.y, line.error[1]) == ([1.5, 3], 0.0)
    band = Line("b", [1, 2], [1, 2], [0.1, 0.2], band=True, notes=["here"])
    panels = [Panel("x", "y", "t", [line, band], log="xy", legend=True)]
    draw(tmp_path / "new" / "a.png", "a title that is longer than a line " * 8, panels)
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
