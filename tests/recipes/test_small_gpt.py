"""The small GPT: text, model, runs on real ranks, the comparison, and bad input."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchcomp
from recipes.errors import RecipeError
from recipes.experiments import ResultTable
from recipes.result_files import read_csv
from recipes.small_gpt import experiment, pictures, training
from recipes.small_gpt.corpus import VOCABULARY, open_corpus, windows
from recipes.small_gpt.model import Shape, SmallGPT
from recipes.small_gpt.summary import summaries
from recipes.spread import Spread
from tests.recipes.forked_ranks import RECIPES
from tests.support.ranks import on_threads
from torchcomp import SpecError

FOLDER = RECIPES / "small_gpt"
LOCAL = 'every(2) with compress=ef(quantize("int8")), outer=nesterov(lr=0.7, momentum=0.5)'


def test_text_is_fixed_and_its_parts_share_no_paragraph() -> None:
    corpus = open_corpus()
    open_corpus.cache_clear()
    again = open_corpus()
    assert again.name == corpus.name
    assert torch.equal(again.train, corpus.train)
    parts = [
        set("".join(map(chr, part.tolist())).split(chr(0) * 2))
        for part in (corpus.train, corpus.validation)
    ]
    assert not parts[0] & parts[1]
    assert int(corpus.train.max()) < VOCABULARY
    assert 5 * len(corpus.validation) < len(corpus.train)


def test_targets_are_the_next_characters() -> None:
    inputs, targets = windows(torch.arange(10), torch.tensor([0, 4]), 3)
    assert inputs.tolist() == [[0, 1, 2], [4, 5, 6]]
    assert targets.tolist() == [[1, 2, 3], [5, 6, 7]]


def test_model_does_not_see_the_future() -> None:
    torch.manual_seed(0)
    model = SmallGPT(Shape(VOCABULARY, context=8, width=16))
    tokens = torch.randint(VOCABULARY, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % VOCABULARY
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("dense", ("dense", {})),
        ("ef(topk(0.01))", ("ef(topk(0.01))", {})),
        ("every(8)", ("every(8)", {})),
        ("every(8) with outer=slowmo", ("every(8)", {"outer": "slowmo"})),
        ('every(8) with compress=cast("bf16")', ("every(8)", {"compress": 'cast("bf16")'})),
        (
            LOCAL,
            (
                "every(2)",
                {"compress": 'ef(quantize("int8"))', "outer": "nesterov(lr=0.7, momentum=0.5)"},
            ),
        ),
    ],
)
def test_a_method_is_split_into_its_strings(method: str, expected: Any) -> None:
    assert training.split(method) == expected
    experiment.check_method("mean" if method == "dense" else method)


@pytest.mark.parametrize("method", ["dense", "ef(warmup(topk(0.1), steps=2))", LOCAL])
def test_a_run_counts_what_the_plan_says(method: str) -> None:
    def body() -> training.Outcome:
        outcome = training.train(training.Run(method, steps=4, seed=1))
        assert dist.get_world_size() == 2
        return outcome

    outcomes = on_threads(2, body)
    assert len({outcome.loss for outcome in outcomes}) == 1
    assert 2 < outcomes[0].loss < 6
    model = SmallGPT(training.SHAPE)
    dense = torchcomp.explain("mean", model=model, world_size=2).bytes_sent
    assert outcomes[0].dense_bytes == 4 * dense
    spec, options = training.split(method)
    if method == "dense":
        expected = 4 * dense
    elif options:
        plan = torchcomp.explain(spec, model=model, world_size=2, total_steps=4, **options)
        expected = 4 * plan.bytes_sent
    else:
        plan = torchcomp.explain(spec, model=model, world_size=2)
        expected = 2 * plan.warmup_bytes_sent + 2 * plan.bytes_sent
    assert outcomes[0].nbytes == pytest.approx(expected, abs=4)


ROWS = [
    {"method": method, "seed": seed, "loss": loss, "bytes": nbytes, "dense_bytes": "800"}
    for method, nbytes, losses in (
        ("dense", "800", ("2.0", "3.0")),
        ("every(8)", "100", ("2.1", "3.3")),
    )
    for seed, loss in zip("01", losses, strict=True)
]


def test_losses_are_compared_seed_by_seed() -> None:
    dense, local = summaries(ROWS)
    assert (dense.excess, dense.saving) == (Spread(0.0, 0.0, 2), 1.0)
    assert (local.method, local.saving) == ("every(8)", 8.0)
    assert local.loss.mean == pytest.approx(2.7)
    assert local.excess.mean == pytest.approx(7.5)
    assert local.excess.deviation == pytest.approx(12.5**0.5)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pictures.draw_tradeoff(summaries(ROWS), "title", tmp_path / "tradeoff.png")
    assert (tmp_path / "tradeoff.png").stat().st_size > 10_000


def parsed(tmp_path: Path, *words: str) -> argparse.Namespace:
    return experiment.parse(["--out", str(tmp_path), *words])


def test_a_resumed_comparison_runs_what_is_missing(tmp_path: Path) -> None:
    arguments = parsed(tmp_path, "--methods", "every(8)", "--seeds", "0,1", "--steps", "5")
    table = ResultTable(tmp_path / "runs.csv", experiment.COLUMNS, "task", resume=False)
    table.rows = [row for row in ROWS if (row["method"], row["seed"]) != ("every(8)", "1")]
    assert experiment.missing(arguments, table) == [training.Run("every(8)", 5, 1)]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--methods", "topkk(0.1)"], "topkk"),
        (["--methods", "every(8) with compress=every(2)"], r"every\(2\)"),
        (["--methods", "every(8) with outer=mean"], "mean"),
        (["--ranks", "3"], "--ranks 3"),
        (["--steps", "0"], "--steps"),
        (["--lr", "-1"], "--lr"),
        (["--only", "short"], "--only"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, words: list[str], problem: str) -> None:
    with pytest.raises((RecipeError, SpecError), match=problem):
        parsed(tmp_path, *words)


def test_other_settings_do_not_overwrite_the_published_results() -> None:
    assert experiment.parse([]).out == FOLDER / "results"
    for words in (["--steps", "5"], ["--ranks", "4"], ["--methods", "every(2)"], ["--lr", "0.1"]):
        assert experiment.parse(words).out == Path("runs/small_gpt")


def test_the_published_results_are_complete() -> None:
    rows = read_csv(FOLDER / "results" / "runs.csv")
    runs = {(row["method"], row["seed"]) for row in rows}
    assert runs == {(method, seed) for method in experiment.METHODS for seed in "01234"}
