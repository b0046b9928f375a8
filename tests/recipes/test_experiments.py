"""The shared parts of the experiments: flags, tables that resume, spreads, tables of pages."""

import importlib
import math
import sys
from pathlib import Path

import pytest

from benchmarks.net.shell import missing
from recipes.errors import RecipeError
from recipes.experiments import ExperimentParser, ResultTable
from recipes.page_tables import filled, pages
from recipes.rows import best, paired, spread
from tests.recipes.runs import RECIPES

HOME = Path("recipes") / "work"
EXPERIMENTS = sorted(path.parent.name for path in RECIPES.glob("*/experiment.py"))


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
    for text in ("", "-1", "a", str(2**32)):
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


@pytest.mark.parametrize("page", list(pages()), ids=lambda page: f"{page.parent.name}/{page.name}")
def test_the_tables_of_the_pages_are_those_of_the_results(page):
    text = page.read_text()
    assert text == filled(text), "run python -m recipes.page_tables"


def test_a_file_that_cannot_be_resumed_is_refused(tmp_path):
    def opened(resume):
        return ResultTable(tmp_path / "runs.csv", ("run",), ("loss",), "a task", resume=resume)

    opened(resume=False).add(("a",), (1,))
    path = tmp_path / "runs.csv"
    whole = path.read_bytes()
    for content in (whole + b"c", *(whole.replace(old, b"other") for old in (b"loss", b"a task"))):
        path.write_bytes(content)
        with pytest.raises(RecipeError, match=r"runs\.csv"):
            opened(resume=True)
        assert path.read_bytes() == content
    path.write_bytes(whole)
    assert opened(resume=True).missing([("a",), ("b",)]) == [("b",)]


def test_spreads_and_paired_differences():
    # Seeds 0 and 1 differ by 1 and 3. Only one side has seed 2.
    difference = paired({0: 2.0, 1: 5.0, 2: 9.0}, {1: 2.0, 0: 1.0})
    assert (difference.mean, difference.count) == (2.0, 2)
    assert difference.with_error() == "+2.00 ± 1.00"
    texts = {(1, 2, 3): "2.0 ± 1.0", (1.0,): "1.0", (-0.001,): "0.0"}
    assert {values: spread(values).with_deviation(1) for values in texts} == texts
    # A run that diverged counts as nothing.
    accuracies = [(1, 90.0), (1, 90.0), (2, 99.0), (2, math.nan)]
    assert best([{"lr": lr, "accuracy": each} for lr, each in accuracies], "lr", "accuracy") == 1


FEW = ("--methods", 'every(8) with compress=quantize("int8")', "ef(topk(0.1))", "--seeds", "3")
# By experiment and flags: the pictures that it draws.
QUICK = {
    ("bidirectional_topk", "--only", "lr_inside", "--processes", "1"): set(),
    ("jointspar", "--only", "bandit", "--processes", "1"): set(),
    ("qsr", "--only", "clean_labels"): {"accuracy", "differences"},
    ("small_gpt", *FEW, "--steps", "4"): {"tradeoff"},
    ("two_direction", "--only", "contest"): {"contest_digits_n10"},
}
LONGER = {
    ("bidirectional_topk", "--processes", "1"): {"counterexample", "union"},
    ("jointspar", "--only", "convergence", "--processes", "1"): {
        *("convergence_sgd", "convergence_lars"),
    },
    ("jointspar", "--only", "large_batch"): set(),
    ("qsr", "--only", "sgd_mlp", "adamw_vit"): {"accuracy", "differences"},
    ("two_direction", "--only", "winners", "scaling"): set(),
}
TIMED = ("jointspar", "--only", "large_batch", "wall_clock"), set()
LATER = pytest.mark.thorough
CASES = [*QUICK.items(), *(pytest.param(*each, marks=LATER) for each in LONGER.items())]
CASES.append(
    pytest.param(*TIMED, marks=[LATER, pytest.mark.skipif(bool(missing()), reason=missing())])
)


@pytest.mark.parametrize(("words", "pictures"), CASES)
def test_a_quick_run_and_its_resumption_which_adds_nothing(words, pictures, tmp_path, monkeypatch):
    name, *flags = words
    program, written = importlib.import_module(f"recipes.{name}.experiment"), []
    for more in ([], ["--resume"]):
        command = [f"/x/recipes/{name}/experiment.py", "--quick", "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", [*command, *flags, *more])
        program.main()
        written.append({path.name: path.read_bytes() for path in tmp_path.glob("*.csv")})
    assert written[0] == written[1] != {}
    assert {path.stem for path in tmp_path.glob("*.png")} == pictures
