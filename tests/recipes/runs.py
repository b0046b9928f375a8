"""Runs of the trainer on several ranks, and what they and the experiments leave."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from recipes import train
from recipes.interruption import Interruption
from recipes.rows import read_rows, where
from recipes.settings import read_settings

RECIPES = Path(train.__file__).parent


def train_rank(flags, sent=None, after=0, to=()):
    """Train as one rank of the default group; return its first step and its exit code.

    The ranks ``to`` send themselves the signal ``sent`` after a step.
    """
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    first, after_step = [], Interruption.after_step

    def signalled(self, step):
        first.append(step)
        if step == after and int(rank) in to:
            os.kill(os.getpid(), sent)
        return after_step(self, step)

    with (
        # The group exists already, and outlives the run.
        patch.multiple(train, init_distributed=lambda *_: None, cleanup_distributed=lambda: None),
        patch.object(Interruption, "after_step", signalled),
    ):
        try:
            train.train(read_settings(flags))
        except SystemExit as exit_:
            return first[0], exit_.code
    return first[0], 0


def summary_in(folder):
    return json.loads((folder / "summary.json").read_text())


def steps_and_losses(out):
    """Return what a run has logged: a pair for every line, of a step or of an epoch."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line.get("loss", line.get("train_loss"))) for line in lines]


def assert_equal_runs(one, other):
    """Require the same weights, traffic and losses, bit for bit."""
    ones, others = summary_in(one), summary_in(other)
    for name in ("weights_sha256", "bytes_sent", "synchronisations", "ranks"):
        assert ones[name] == others[name]
    assert ones["replicas_agree"]
    assert steps_and_losses(one) == steps_and_losses(other)


def steps_of(out):
    """Return the steps of the complete checkpoints of a run."""
    return sorted(int(path.parent.name[5:]) for path in out.glob("checkpoints/*/complete.json"))


def published(name, table, **wanted):
    """Return the only published row that is as wanted."""
    (row,) = where(read_rows(RECIPES / name / "results" / f"{table}.csv"), **wanted)
    return row
