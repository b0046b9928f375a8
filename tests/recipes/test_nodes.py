"""The small GPT: its modes on nodes agree, count bytes, and load each other's checkpoints."""

import hashlib
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import torchcomp
from recipes.errors import RecipeError
from recipes.nodes import train
from recipes.nodes.modes import MODES
from recipes.nodes.train import TEXT, Settings, open_corpus, read_settings
from recipes.small_gpt import experiment as small_gpt
from recipes.small_gpt.corpus import VOCABULARY, Corpus, windows
from recipes.small_gpt.model import Shape, SmallGPT
from recipes.small_gpt.training import SHAPE
from tests.fsdp.runs import NEEDS_HOOK
from tests.support import commands
from tests.support.outcomes import raised_by
from tests.support.ranks import on_processes
from torchcomp import SpecError

# One selection per parameter: the same in DDP's buckets as in FSDP2's units.
TOPK = 'ef(topk(0.1, scope="tensor"))'
CPU = torch.device("cpu")


def test_a_prediction_depends_on_earlier_tokens_only():
    torch.manual_seed(0)
    model = SmallGPT(Shape(vocabulary=11, context=8))
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (tokens[:, 5:] + 1) % 11
    torch.testing.assert_close(model(changed)[:, :5], model(tokens)[:, :5])
    assert not torch.allclose(model(changed)[:, 5:], model(tokens)[:, 5:])


def test_the_text_is_that_of_the_page_and_its_parts_share_no_paragraph():
    digest = hashlib.sha256(TEXT.read_bytes()).hexdigest()
    assert digest in (TEXT.parent / "README.md").read_text()
    assert int(open_corpus().train.max()) < VOCABULARY
    corpus = Corpus.of("\n\n".join(f"paragraph {i % 30}" for i in range(60)), "made")
    assert len(corpus.train) > 8 * len(corpus.validation)
    inputs, targets = windows(corpus.train, torch.tensor([0, 7]), 5)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@contextmanager
def short_text():
    """Train on a piece of the text, which is evaluated in milliseconds."""
    with patch.object(train, "open_corpus", lambda: Corpus.of(TEXT.read_text()[:20_000], "piece")):
        yield


def outcome(mode, spec, steps=2, **options):
    return train.train(Settings(mode=mode, compress=spec, steps=steps, **options), CPU)


def in_all_modes():
    with short_text():
        return {(mode, spec): outcome(mode, spec) for spec in ("mean", TOPK) for mode in MODES}


@NEEDS_HOOK
def test_modes_agree():
    found = on_processes(4, in_all_modes)
    assert len({tuple(each.items()) for each in found}) == 1
    losses = {key: each.loss for key, each in found[0].items()}
    for other in ("two-level", "hsdp"):
        assert losses[other, "mean"] == pytest.approx(losses["ddp", "mean"], abs=1e-5)
    assert losses["hsdp", TOPK] == pytest.approx(losses["two-level", TOPK], abs=1e-5)
    assert losses["ddp", TOPK] != pytest.approx(losses["two-level", TOPK], abs=1e-5)
    model = SmallGPT(SHAPE)
    plan = torchcomp.explain(TOPK, model=model, world_size=4, nodes=2).nodes
    flat, two, hsdp = (found[0][mode, TOPK] for mode in MODES)
    assert (flat.between, two.between) == (plan.flat_card_bytes, plan.card_bytes)
    assert hsdp.between == pytest.approx(two.between, rel=0.01)
    assert two.inside == 2 * plan.inside_bytes_sent
    residual = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert (flat.residual, two.residual, hsdp.residual) == (residual, residual // 2, residual // 2)


def resumed(folder):
    """The losses of an HSDP and of a DDP run, those of resumed runs, and two errors."""
    with short_text():
        starts = [killed(mode, f"{folder}/{mode}") for mode in ("hsdp", "ddp")]
        options = {"steps": 4, "resume": True}
        pairs = (("hsdp", "hsdp"), ("hsdp", "two-level"), ("ddp", "hsdp"))
        losses = [outcome(now, TOPK, **options, out=f"{folder}/{old}").loss for old, now in pairs]
        out = f"{folder}/hsdp"
        other = raised_by(lambda: outcome("hsdp", TOPK, **options, out=out, seed=1))
        missing = raised_by(lambda: outcome("hsdp", TOPK, **options, out=f"{folder}/x"))
    return starts, losses, repr(other), repr(missing)


def killed(mode, folder):
    """Run for 4 steps, and leave the checkpoints as if the run had been killed after step 2."""
    loss = outcome(mode, TOPK, steps=4, out=folder, checkpoint_every=2).loss
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, "step-000004", ".metadata").unlink()
    dist.barrier()
    return loss


@NEEDS_HOOK
def test_a_run_resumes_in_any_mode(tmp_path):
    for (hsdp, ddp), losses, other, missing in on_processes(4, resumed, str(tmp_path)):
        assert losses[0] == hsdp
        assert losses[1] == pytest.approx(hsdp, abs=1e-5)
        assert losses[2] == pytest.approx(ddp, abs=0.1)
        assert other.startswith("RecipeError")
        assert "seed 1" in other
        assert missing.startswith("RecipeError")


@pytest.mark.parametrize(
    "words", ["--mode fsdp", "--compress topkk(0.1)", "--ranks-per-node 3", "--batch 6"]
)
def test_bad_input_is_named(words):
    with pytest.raises((RecipeError, SpecError), match=words.split()[1][:5]):
        read_settings(words.split(), 4)
    for flags in (["--methods", "every(8) with compress=topkk"], ["--ranks", "3"], ["--lr", "0"]):
        with pytest.raises((RecipeError, SpecError)):
            small_gpt.parse(flags)


@NEEDS_HOOK
@pytest.mark.thorough
def test_the_program_under_torchrun(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    flags = ["--mode", "hsdp", "--steps", "2", "--log-every", "1", "--device", "cpu"]
    command = [*launcher, "--nproc-per-node", "4", "-m", "recipes.nodes.train", *flags]
    printed = commands.run(command, OMP_NUM_THREADS="1").stdout.splitlines()
    assert [line.split(":")[0] for line in printed[:2]] == ["step 1", "step 2"]
    assert "validation loss" in printed[2]
