"""The shared parts of the experiments: flags, tables that resume, spreads, tables of pages."""

import importlib
import sys
from pathlib import Path

import pytest

from benchmarks.net.shell import missing
from recipes.errors import RecipeError
from recipes.experiments import ExperimentParser
from recipes.page_tables import filled, pages
from tests.support.cases import thorough

HOME = Path("recipes") / "work"


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


@pytest.mark.parametrize("page", list(pages()), ids=lambda page: f"{page.parent.name}/{page.name}")
def test_the_tables_of_the_pages_are_those_of_the_results(page):
    text = page.read_text()
    assert text == filled(text), "run python -m recipes.page_tables"


FEW = ("--methods", 'every(8) with compress=quantize("int8")', "ef(topk(0.1))", "--seeds", "3")
QUICK = [
    ("bidirectional_topk", "--only", "lr_inside", "--processes", "1"),
    ("jointspar", "--only", "bandit", "--processes", "1"),
    ("qsr", "--only", "clean_labels"),
    ("small_gpt", *FEW, "--steps", "4"),
    ("two_direction", "--only", "contest"),
]
LONGER = [
    ("bidirectional_topk", "--processes", "1"),
    ("jointspar", "--only", "convergence", "--processes", "1"),
    ("jointspar", "--only", "large_batch", *(() if missing() else ("wall_clock",))),
    ("qsr", "--only", "sgd_mlp", "adamw_vit"),
    ("two_direction", "--only", "winners", "scaling"),
]


@pytest.mark.parametrize("words", [*QUICK, *thorough(LONGER)], ids=" ".join)
def test_a_quick_run_and_its_resumption_which_adds_nothing(words, tmp_path, monkeypatch):
    name, *flags = words
    program, written = importlib.import_module(f"recipes.{name}.experiment"), []
    for more in ([], ["--resume"]):
        command = [f"/x/recipes/{name}/experiment.py", "--quick", "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", [*command, *flags, *more])
        program.main()
        written.append({path.name: path.read_bytes() for path in tmp_path.glob("*.csv")})
    assert written[0] == written[1] != {}
