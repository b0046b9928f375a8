"""The shared parts of the experiments: flags, tables that resume, spreads, tables of pages."""

import importlib
import math
import shlex
from pathlib import Path

import pytest

from recipes import experiments, page_tables
from recipes.errors import RecipeError
from recipes.experiments import PROVENANCE, ExperimentParser, ResultTable, tuning_seeds
from recipes.page_tables import filled, markdown_table, pages
from recipes.result_files import read_csv, read_notes
from recipes.spread import Spread, paired, spread

HOME = Path("recipes") / "work"
RECIPES = Path(page_tables.__file__).parent
EXPERIMENTS = sorted(path.parent.name for path in RECIPES.glob("*/experiment.py"))
RESULTS = sorted(path.relative_to(RECIPES) for path in RECIPES.glob("*/results/**/*.csv"))


def parser() -> ExperimentParser:
    return ExperimentParser("text", HOME, ("one", "two"), seeds=(0, 1), quick_seeds=(0,))


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        ([], (0, 1)),
        (["--quick"], (0,)),
        (["--seeds", "3,7,11"], (3, 7, 11)),
        (["--seeds", "7, 3,7"], (7, 3)),
        (["--quick", "--seeds", "5"], (5,)),
    ],
)
def test_seeds_are_a_list(words: list[str], seeds: tuple[int, ...]) -> None:
    assert parser().read(words).seeds == seeds


@pytest.mark.parametrize("text", ["", "1,", "-1", "1.5", "a", "1;2", str(2**32)])
def test_a_bad_list_of_seeds_is_named(text: str) -> None:
    with pytest.raises(RecipeError, match="--seeds"):
        parser().read([f"--seeds={text}"])


def test_parts_run_once_and_in_order() -> None:
    assert parser().read([]).only == ["one", "two"]
    assert parser().read(["--only", "two", "one", "two"]).only == ["one", "two"]


def test_other_seeds_do_not_overwrite_the_published_results() -> None:
    def folder(*words: str, published: bool = True) -> Path:
        return parser().output_folder(parser().read(words), published=published)

    assert folder() == folder("--seeds", "0,1") == HOME / "results"
    assert folder("--seeds", "3,7") == folder(published=False) == Path("runs/work")
    assert folder("--seeds", "3", "--quick") == Path("runs/work-quick")
    assert folder("--seeds", "3", "--out", "mine") == Path("mine")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_all_experiments_have_the_same_flags(name: str, tmp_path: Path) -> None:
    program = importlib.import_module(f"recipes.{name}.experiment")
    words = ["--seeds", "3,7,11", "--quick", "--resume", "--out", str(tmp_path / "new")]
    parsed = program.parse(words)
    assert parsed.seeds == (3, 7, 11)
    assert (parsed.quick, parsed.resume, parsed.out) == (True, True, tmp_path / "new")
    for flag, value in (("--seeds", "a"), ("--only", "nothing"), ("--unknown", "1")):
        with pytest.raises(RecipeError, match=flag):
            program.parse([flag, value])
    assert not parsed.out.exists()


@pytest.mark.parametrize("path", RESULTS, ids=str)
def test_published_rows_name_a_command_that_makes_them(path: Path) -> None:
    rows = read_csv(RECIPES / path)
    if set(PROVENANCE) - set(rows[0]):
        assert path.stem.endswith("_curves") or "command" in read_notes(RECIPES / path)
        return
    seeds: dict[str, set[int]] = {}
    for row in rows:
        seeds.setdefault(row["command"], set()).update([int(row["seed"])] if "seed" in row else [])
    for command, measured in seeds.items():
        python, flag, module, *words = shlex.split(command)
        assert (python, flag, module.split(".")[1]) == ("python", "-m", path.parts[0])
        parsed = importlib.import_module(module).parse(words)
        assert measured <= {*parsed.seeds, *tuning_seeds(parsed.seeds, 3)}


def test_tuning_uses_no_reported_seed() -> None:
    assert tuning_seeds((0, 1), 2) == (1000, 1001)
    assert tuning_seeds((1000, 1002), 2) == (1001, 1003)


def test_every_row_says_how_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs.csv"
    for command, rows in (("first", [("a", 1), ("b", 2)]), ("second", [("c", 3)])):
        monkeypatch.setattr("sys.argv", ["/private/recipes/work/experiment.py", command])
        table = ResultTable(path, ("name", "value"), "a task", resume=command == "second")
        table.add(*rows)
    written = read_csv(path)
    assert [(row["name"], row["value"]) for row in written] == [("a", "1"), ("b", "2"), ("c", "3")]
    module = "python -m recipes.work.experiment"
    assert [row["command"] for row in written] == [
        f"{module} {c}" for c in ("first",) * 2 + ("second",)
    ]
    assert all(row["versions"] and row["date"] for row in written)
    assert table.rows == written


def test_points_of_curves_have_no_provenance(tmp_path: Path) -> None:
    table = ResultTable(tmp_path / "curves.csv", ("x", "y"), "a task", resume=False, curves=True)
    table.add((1, 2))
    assert read_csv(table.path) == [{"x": "1", "y": "2"}]


@pytest.mark.parametrize(("header", "task"), [(("name",), "a task"), (("name", "value"), "other")])
def test_rows_of_another_experiment_are_refused(
    tmp_path: Path, header: tuple[str, ...], task: str
) -> None:
    path = tmp_path / "runs.csv"
    ResultTable(path, ("name", "value"), "a task", resume=False).add(("a", 1))
    before = path.read_bytes()
    with pytest.raises(RecipeError, match="--resume"):
        ResultTable(path, header, task, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", [b"c", b"c,2,3,4,5,6", bytes(range(128, 256))])
def test_a_damaged_table_is_refused(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "runs.csv"
    ResultTable(path, ("name", "value"), "a task", resume=False).add(("a", 1))
    whole = path.read_bytes()
    path.write_bytes(whole + damage if damage[:1] == b"c" else damage)
    before = path.read_bytes()
    with pytest.raises(RecipeError, match=r"runs\.csv"):
        ResultTable(path, ("name", "value"), "a task", resume=True)
    assert path.read_bytes() == before


def test_an_interrupted_save_keeps_the_old_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = ResultTable(tmp_path / "runs.csv", ("name",), "a task", resume=False)
    table.add(("a",))
    before = table.path.read_bytes()

    def interrupted(path: Path, *_: object, **__: object) -> None:
        path.write_text("half a li")
        raise KeyboardInterrupt

    monkeypatch.setattr(experiments, "write_csv", interrupted)
    with pytest.raises(KeyboardInterrupt):
        table.add(("b",))
    assert table.path.read_bytes() == before


def test_spread_of_values_and_of_paired_differences() -> None:
    assert spread([1, 2, 3]) == Spread(2.0, 1.0, 3)
    assert spread([1, 2, 3]).with_deviation(1) == "2.0 ± 1.0"
    assert spread([1, 2, 3]).error == pytest.approx(1 / math.sqrt(3))
    # Seeds 0 and 1 differ by 1 and 3. Only one side has seed 2.
    difference = paired({0: 2.0, 1: 5.0, 2: 9.0}, {1: 2.0, 0: 1.0})
    assert (difference.mean, difference.count) == (2.0, 2)
    assert difference.error == pytest.approx(1.0)
    assert difference.with_error() == "+2.00 ± 1.00"


def test_a_single_value_has_no_deviation() -> None:
    assert math.isnan(spread([1.0]).deviation)
    assert spread([1.0]).with_deviation() == "1.00"
    assert spread([-0.001]).with_error(2) == "+0.00"


def test_a_small_deviation_does_not_look_like_none() -> None:
    assert spread([1.0, 1.004]).with_deviation(1) == "1.002 ± 0.003"
    assert spread([1.0, 1.0]).with_deviation(1) == "1.0 ± 0.0"
    # Two digits more are not enough either.
    assert spread([1.0, 1.00001]).with_deviation(1) == "1.0 ± 0.0"


def test_differences_need_a_common_seed() -> None:
    with pytest.raises(ValueError, match="seed"):
        paired({0: 1.0}, {1: 1.0})


@pytest.mark.parametrize("page", list(pages()), ids=lambda page: f"{page.parent.name}/{page.name}")
def test_the_tables_of_the_pages_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert text == filled(text), "run python -m recipes.page_tables"


def test_a_table_is_written_between_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"numbers": lambda results: markdown_table(["a", "b"], [[1, results.parent.name]])}
    monkeypatch.setattr(page_tables, "tables_of", lambda folder: made)
    text = "before\n<!-- table: work/numbers -->\nold\n<!-- end -->\nafter"
    assert filled(text) == (
        "before\n<!-- table: work/numbers -->\n"
        "| a | b |\n| --- | --- |\n| 1 | work |\n<!-- end -->\nafter"
    )


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table: small_gpt/dense -->\nno end",
        "<!-- table: small_gpt/dense -->\n<!-- table: small_gpt/dense -->\n<!-- end -->",
        "<!-- table: small_gpt/unknown -->\n<!-- end -->",
        "<!-- table: unknown/dense -->\n<!-- end -->",
    ],
)
def test_a_bad_mark_is_refused(text: str) -> None:
    with pytest.raises(RecipeError):
        filled(text)


def test_provenance_is_at_the_end_of_a_row(tmp_path: Path) -> None:
    table = ResultTable(tmp_path / "runs.csv", ("name",), "a task", resume=False)
    assert table.header == ("name", *PROVENANCE)
