"""If a rank dies, its round is lost; the run continues with fewer or more ranks."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchcomp
from tests.local_sgd import elastic, reference
from tests.local_sgd.script import Script, constant
from tests.support.outcomes import assert_close, assert_refused, equal_on_all
from tests.support.patience import PATIENCE
from tests.support.ranks import on_threads

ROOT = Path(__file__).parents[2]


def torchrun(ranks, folder, fatal):
    """Start the script as a user would, and wait until it ends."""
    options = ["--standalone", "--nproc-per-node", str(ranks), "--monitor-interval", "0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, elastic.__file__]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [*command, str(folder), str(fatal)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def uninterrupted(crew, start, stop):
    """Train `crew` in float64, in rounds of three steps; return the weights at the end."""
    for step in range(start, stop):
        for worker in crew:
            worker.step(step, constant(step))
        if (step + 1) % 3 == 0:
            reference.average(crew, 0.0)
    return torch.cat([w.flatten() for w in crew[0].weights])


def resized(crew, ranks):
    """One worker for each rank; a new worker copies the momentum of an old one."""
    fresh = [copy.deepcopy(crew[rank % len(crew)]) for rank in range(ranks)]
    for rank, worker in enumerate(fresh):
        worker.rank = rank
    return fresh


@pytest.mark.thorough
def test_a_rank_that_dies_inside_a_round_costs_only_that_round(tmp_path):
    crew = [reference.Worker(rank, reference.Momentum()) for rank in range(3)]
    # Rank 1 dies at its 8th step, and the run resumes from step 6. It dies again at the 14th step,
    # and the run resumes from step 12.
    for ranks, fatal, start, stop in [(3, 8, 0, 6), (2, 14, 6, 12), (3, 0, 12, 18)]:
        ended = torchrun(ranks, tmp_path, fatal)
        assert bool(ended.returncode) == bool(fatal), ended.stderr
        crew = resized(crew, ranks)
        expected = uninterrupted(crew, start, stop)
        assert not (tmp_path / f"{stop + 3}").exists()
        saved = [torch.load(tmp_path / f"{stop}" / f"{rank}.pt") for rank in range(ranks)]
        assert equal_on_all(each["weights"] for each in saved)
        assert_close(saved[0]["weights"], expected)


def test_states_from_inside_a_round_fit_only_the_same_number_of_ranks():
    def saved():
        script = Script("every(3)", 12)
        script.train(0, 4)
        return script.sync.state_dict()

    states = on_threads(3, saved)

    def body():
        script = Script("every(3)", 12)
        script.sync.load_state_dict(torchcomp.redistribute(states, 2)[script.rank])

    words = ("rank 0 of 3", "sync.next_sync")
    assert_refused(2, body, torchcomp.CheckpointError, *words)
