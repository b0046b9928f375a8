"""The elastic recipe: after a kill, the same number of ranks ends with the same bits, and another
number loses nothing."""

import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchcomp
from recipes.checkpoints import Marker
from recipes.elastic.train import Run, Settings, main, read_settings
from recipes.errors import RecipeError
from tests.support.cases import thorough
from tests.support.outcomes import same
from tests.support.ranks import on_processes

STEPS, EVERY = 60, 16
METHODS = {
    "ef": {"compress": "ef(topk(0.01))"},
    "bidirectional": {"compress": 'bidirectional(topk(0.02), quantize("int8"), selection="shard")'},
    "local": {"compress": "ef(topk(0.05))", "sync": "every(8)", "outer": "nesterov()"},
}


class Counted(Run):
    """A run that sums lr times the gradients of this rank, and takes the sums along."""

    def __init__(self, settings, dies_after=0):
        self.dies_after, self.sums = dies_after, None
        super().__init__(settings)
        self.start = getattr(self, "start", self.weights())
        named = dict(self.model.module.named_parameters())
        self.sums = self.sums or {name: torch.zeros_like(p) for name, p in named.items()}
        for name, parameter in named.items():
            # Called with the gradient of this rank, before DDP averages it.
            parameter.register_hook(lambda grad, name=name: self.add(name, grad))

    def weights(self):
        return {name: w.clone() for name, w in self.model.module.state_dict().items()}

    def add(self, name, grad):
        self.sums[name].add_(grad, alpha=self.optimizer.param_groups[0]["lr"])

    def backward(self):
        if self.rank == 1 and self.step == self.dies_after > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        super().backward()

    def state_dict(self):
        return {**super().state_dict(), "sums": self.sums}

    def resized(self, states):
        return {**super().resized(states), "sums": mean_sums(states)}

    def load(self, state):
        self.start = self.weights()
        super().load(state)
        self.sums = state["sums"]


def mean_sums(states):
    names = states[0]["sums"]
    return {name: torch.stack([each["sums"][name] for each in states]).mean(0) for name in names}


def train(settings, dies_after=0):
    run = Counted(settings, dies_after)
    run.train()
    run.method.close()
    return run.start


def finished(ranks, settings):
    """Train until the end. Return the states of all ranks, and what is lost, relative to all.

    Without an outer step, the sum of lr times mean gradient = what was applied + what is unsent.
    """
    start = on_processes(ranks, train, settings)[0]
    folder = Path(settings.out) / "checkpoints" / f"step-{settings.steps:09d}"
    assert len(Marker.read(folder).sha256) == ranks
    states = [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)]
    (joined,) = torchcomp.redistribute([state["method"] for state in states], 1)
    worst = largest = 0.0
    for name, total in mean_sums(states).items():
        # The residual of local steps is a change of weights, the other a gradient of the last lr.
        unit = joined["lrs"][name] if settings.sync == "none" else -1.0
        slots = (joined["slots"].get(slot) for slot in ("error", "server_error"))
        unsent = sum(slot["tensors"][name].view_as(total) for slot in slots if slot)
        moved = start[name] - states[0]["model"][name] + unit * unsent
        worst = max(worst, float((moved - total).abs().max()))
        largest = max(largest, float(total.abs().max()))
    return states, worst / largest


@pytest.mark.parametrize("method", ["bidirectional", *thorough(["ef", "local"])])
def test_a_killed_run_ends_with_the_same_bits_or_conserves(method, tmp_path):
    folder = tmp_path / "run"
    settings = Settings(**METHODS[method], steps=STEPS, checkpoint_every=EVERY, out=str(folder))
    outcomes = on_processes(3, train, settings, 41, catch=True)
    assert all(isinstance(outcome, Exception) for outcome in outcomes)
    steps = [int(path.parent.name[5:]) for path in folder.glob("*/*/complete.json")]
    assert sorted(steps) == [16, 32]

    resized = tmp_path / "resized"
    shutil.copytree(folder, resized)
    whole, _ = finished(3, replace(settings, out=str(tmp_path / "whole")))
    again, _ = finished(3, settings)
    for one, other in zip(again, whole, strict=True):
        # A new process compares its settings with the other ranks, which sends some more bytes.
        one["method"].pop("traffic"), other["method"].pop("traffic")
        assert same(one, other)
    states, lost = finished(2, replace(settings, out=str(resized)))
    assert len(states) == 2
    assert settings.outer != "none" or lost < 1e-13


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--batch", "50"], RecipeError),
        (["--outer", "nesterov()"], RecipeError),
        (["--compress", "topkk"], torchcomp.SpecError),
    ],
)
def test_flags_that_cannot_be_used(flags, error):
    with pytest.raises(error):
        read_settings(flags, 4)


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
