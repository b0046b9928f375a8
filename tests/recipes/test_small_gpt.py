"""The small GPT: its model, its text, and its experiment."""

import pytest
import torch

import torchcomp
from recipes.errors import RecipeError
from recipes.rows import read_rows
from recipes.small_gpt import experiment, tables
from recipes.small_gpt.corpus import Corpus, open_corpus, windows
from recipes.small_gpt.model import Shape, SmallGPT
from tests.recipes.forked_ranks import RECIPES
from tests.recipes.papers import quick

LOCAL = 'every(8) with compress=quantize("int8")'


def test_a_prediction_depends_on_earlier_tokens_only():
    torch.manual_seed(0)
    model = SmallGPT(Shape(vocabulary=11, context=8))
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (tokens[:, 5:] + 1) % 11
    torch.testing.assert_close(model(changed)[:, :5], model(tokens)[:, :5])
    assert not torch.allclose(model(changed)[:, 5:], model(tokens)[:, 5:])


def test_the_parts_of_the_text_share_no_paragraph():
    corpus = Corpus.of("\n\n".join(f"paragraph {i % 30}" for i in range(60)), "made")
    assert len(corpus.train) > 8 * len(corpus.validation)
    inputs, targets = windows(corpus.train, torch.tensor([0, 7]), 5)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert len(open_corpus().train) > 300_000


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--methods", "ef(topkk(0.1))"], torchcomp.SpecError),
        (["--methods", "every(8) with compress=topkk"], torchcomp.SpecError),
        (["--ranks", "3"], RecipeError),
        (["--lr", "0"], torchcomp.SpecError),
    ],
)
def test_bad_input_is_refused(words, error):
    with pytest.raises(error):
        experiment.parse(words)


def test_a_quick_run_and_resume(tmp_path, monkeypatch):
    methods = ("--methods", LOCAL, "ef(topk(0.1))", "--steps", "4", "--seeds", "3")
    quick("small_gpt", tmp_path, monkeypatch, *methods)
    rows = read_rows(tmp_path / "runs.csv")
    assert [row["method"] for row in rows] == ["dense", LOCAL, "ef(topk(0.1))"]
    assert (tmp_path / "tradeoff.png").is_file()


def test_the_published_runs_save_what_the_page_says():
    found = {each.name: each for each in tables.others(RECIPES / "small_gpt" / "results")}
    assert found["ef(topk(0.01))"].saving == pytest.approx(78.6, abs=0.1)
    assert all(each.excess.count == 5 for each in found.values())
