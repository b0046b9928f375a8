"""The elastic recipe: after a kill, the same number of ranks ends with the same bits, and another
number continues with the mean residual."""

import os
import shutil
import signal
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import torchcomp
from recipes.elastic.train import Run, Settings, main, read_settings
from recipes.errors import RecipeError
from tests.support.cases import thorough
from tests.support.outcomes import same, unsent
from tests.support.ranks import on_processes

METHODS = {
    "ef": {"compress": "ef(topk(0.01))"},
    "bidirectional": {"compress": 'bidirectional(topk(0.02), quantize("int8"), selection="shard")'},
    "local": {"compress": "ef(topk(0.05))", "sync": "every(8)", "outer": "nesterov()"},
}


def states_after(step, settings, ranks):
    folder = f"{settings.out}/checkpoints/step-{step:09d}"
    return [torch.load(f"{folder}/rank-{rank}.pt") for rank in range(ranks)]


def train(settings, dies_after=0):
    """Train to the end, or until rank 1 dies, which the other ranks notice in an exchange."""
    run = Run(settings)
    first, backward = run.state_dict()["method"], run.backward

    def dying():
        if run.rank == 1 and run.step == dies_after > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        backward()

    run.backward = dying
    run.train()
    run.method.close()
    return first


@pytest.mark.parametrize("method", ["bidirectional", *thorough(["ef", "local"])])
def test_a_killed_run_ends_with_the_same_bits_or_conserves(method, tmp_path):
    settings = Settings(**METHODS[method], steps=60, checkpoint_every=16, out=str(tmp_path / "run"))
    outcomes = on_processes(3, train, settings, 41, catch=True)
    assert all(isinstance(outcome, Exception) for outcome in outcomes)
    steps = [int(path.parent.name[5:]) for path in tmp_path.glob("run/*/*/complete.json")]
    assert sorted(steps) == [16, 32]
    saved = [state["method"] for state in states_after(32, settings, 3)]
    resized = replace(settings, out=str(tmp_path / "resized"))
    shutil.copytree(settings.out, resized.out)

    whole = replace(settings, out=str(tmp_path / "whole"))
    for each in (settings, whole):
        on_processes(3, train, each)
    for one, other in zip(states_after(60, settings, 3), states_after(60, whole, 3), strict=True):
        # A new process compares its settings with the other ranks, which sends some more bytes.
        assert one["method"].pop("traffic").keys() == other["method"].pop("traffic").keys()
        assert same(one, other)

    begins = on_processes(2, train, resized)
    torch.testing.assert_close(unsent(begins), unsent(saved), rtol=1e-14, atol=1e-16)
    assert unsent(saved).norm() > 0
    first, second = states_after(60, resized, 2)
    assert same(first["model"], second["model"])


@pytest.mark.parametrize("flags", ["--batch 50", "--outer nesterov()", "--compress topkk"])
def test_flags_that_cannot_be_used(flags):
    with pytest.raises((RecipeError, torchcomp.SpecError)):
        read_settings(flags.split(), 4)


@pytest.mark.parametrize("full", [4, 6])
def test_a_full_disk_ends_a_run_at_its_last_step_only(full, tmp_path, monkeypatch, capfd):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "checkpoints" / f"step-{full:09d}" / ".rank-0.pt"
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    flags = ["--steps", "6", "--checkpoint-every", "4", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["train", *flags])
    if full == 6:
        with pytest.raises(SystemExit, match=r"step, 6, .*No space left on device"):
            main()
        dist.destroy_process_group()
    else:
        main()
        assert "step 4 was not saved" in capfd.readouterr().out
    assert (tmp_path / "checkpoints" / "step-000000006" / "complete.json").exists() == (full == 4)
