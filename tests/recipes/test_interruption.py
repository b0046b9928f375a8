"""SIGUSR1 and SIGTERM end a run after a checkpoint. The resumed run ends with the same bits."""

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipes import interruption
from recipes.errors import RecipeError
from recipes.signals import REQUEUE
from tests.recipes.conftest import (
    assert_equal_runs,
    kill_tree,
    steps_and_losses,
    wait_until,
)
from tests.recipes.forked_ranks import RECIPES, Launcher
from tests.support.cases import only
from tests.support.commands import ROOT
from tests.support.patience import PATIENCE

# 22 steps per epoch. The ranks ask each other at steps 3, 6, ..., mostly inside a round of 4.
FLAGS = ["--loader", "torchvision", "--threads", "1", "--epochs", "4", "--log-every", "1"]
FLAGS += ["--eval-every", "4", "--bn-images", "0"]
FLAGS += ["--signal-every", "3", "--sync", "every(4)", "--compress", "ef(topk(0.01))"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The results of a run on two ranks that is not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    Launcher(folder).start(*FLAGS, "--out", str(folder)).finish()
    return folder


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


def has_begun(out):
    return (out / "metrics.jsonl").exists() and len(steps_and_losses(out)) > 4


def assert_saved(out, printed):
    """Require a checkpoint and no results, and return the checkpoint's step."""
    assert not (out / "summary.json").exists()
    (complete,) = (out / "checkpoints").glob("step-*/complete.json")
    step = int(complete.parent.name[5:])
    assert step % 3 == 0
    assert f"saved step {step}" in printed
    return step


@pytest.mark.parametrize(
    ("number", "signalled"),
    [
        (signal.SIGTERM, [1]),
        pytest.param(signal.SIGUSR1, [0, 1], marks=pytest.mark.thorough),
    ],
)
def test_all_ranks_stop_at_one_step_and_resume_with_the_same_bits(
    number, signalled, whole, out, forked
):
    flags = [*FLAGS, "--out", str(out), "--auto-resume"]
    run = forked.start(*flags)
    wait_until(lambda: has_begun(out), run.is_alive, run.printed)
    for rank in signalled:
        os.kill(run.ranks[rank].pid, number)
    assert run.exit_codes() == [REQUEUE, REQUEUE], run.printed.read_text()
    step = assert_saved(out, run.printed.read_text())
    assert f"resumed after step {step}" in forked.start(*flags).finish()
    assert_equal_runs(whole, out)


@pytest.mark.soak
def test_a_rank_that_is_stopped_ends_the_run_after_the_timeout(forked, out):
    run = forked.start(*FLAGS, "--out", str(out), "--timeout", "3")
    wait_until(lambda: has_begun(out), run.is_alive, run.printed)
    os.kill(run.ranks[1].pid, signal.SIGSTOP)
    run.ranks[0].join(PATIENCE)
    assert run.ranks[0].exitcode not in (None, 0, REQUEUE)


# Slurm: the batch script itself, with stand-ins for srun and scontrol, on two nodes with one rank
# each, both of which are this machine.


class SlurmJob:
    def __init__(self, folder, flags, python=sys.executable):
        self.printed, self.requeued = folder / "printed", folder / "requeued"
        self._flags, self._python, self._id = flags, python, free_port() - 10_000
        self.start()

    def start(self):
        """Start the script as Slurm does, also after a requeue."""
        variables = {
            "PATH": f"{Path(__file__).parent / 'slurm_stand_ins'}:{os.environ['PATH']}",
            "PYTHON": str(self._python),
            "OMP_NUM_THREADS": "1",
            "INTERFACE": "lo",
            "REQUEUED": str(self.requeued),
            "SLURM_JOB_ID": str(self._id),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "1",
            "SLURM_CPUS_PER_TASK": "1",
        }
        with self.printed.open("ab") as file:
            self.script = subprocess.Popen(
                ["bash", RECIPES / "cluster" / "slurm.sbatch", *self._flags],
                cwd=ROOT,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def is_alive(self):
        return self.script.poll() is None

    def assert_requeued(self):
        assert self.script.wait(PATIENCE) == REQUEUE, self.printed.read_text()
        assert len(self.requeued.read_text().splitlines()) == 1


def free_port():
    """Return a port that the batch script can take, and that is free."""
    # Not the global generator, which has the same seed in every test and so would draw one port.
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(10_000, 30_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


@pytest.fixture
def job(tmp_path, out):
    job = SlurmJob(tmp_path, [*FLAGS, "--out", str(out), "--auto-resume"])
    yield job
    if job.is_alive():
        kill_tree(job.script.pid)
        job.script.wait(PATIENCE)


@pytest.mark.soak
def test_a_slurm_job_saves_and_requeues_itself_and_ends_with_the_same_bits(job, whole, out):
    wait_until(lambda: has_begun(out), job.is_alive, job.printed)
    job.script.send_signal(signal.SIGUSR1)  # as Slurm does near the time limit
    job.assert_requeued()
    step = assert_saved(out, job.printed.read_text())
    job.start()
    assert job.script.wait(PATIENCE) == 0, job.printed.read_text()
    assert f"resumed after step {step}" in job.printed.read_text()
    assert_equal_runs(whole, out)


def test_a_signal_before_a_launcher_catches_it_requeues_the_job(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\nkill -USR1 $$\n")
    python.chmod(0o755)
    SlurmJob(tmp_path, [], python).assert_requeued()


# One rank, in this process.


@pytest.fixture
def saved(monkeypatch):
    """Signal this process before and after it saves, and list what it saves."""
    save, saved = torch.save, []

    def save_between_signals(state, file):
        for number in interruption.SIGNALS:
            os.kill(os.getpid(), number)
        save(state, file)
        for number in interruption.SIGNALS:
            os.kill(os.getpid(), number)
        saved.append(Path(file.name).parent.name)

    monkeypatch.setattr(torch, "save", save_between_signals)
    return saved


def test_signals_during_the_saving_do_not_damage_the_checkpoint(
    train_here, digits_flags, saved, monkeypatch
):
    flags = [*digits_flags, "--epochs", "1", "--signal-every", "4", "--checkpoint-every", "5"]
    monkeypatch.setattr(interruption, "ignore_signals", lambda: None)
    with pytest.raises(SystemExit) as exit_:
        train_here(*flags)
    assert exit_.value.code == REQUEUE
    # After the signals at step 5, the ranks ask at step 8 and stop at step 12.
    assert saved == ["step-000000005", "step-000000010", "step-000000012"]
    monkeypatch.undo()
    resumed = train_here(*flags, "--resume")
    whole = train_here(*flags, "--out", f"{digits_flags[-1]}-whole")
    assert resumed["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("every", only(["11", "22", "30"], now=["22"]))
def test_a_run_that_ends_before_the_answer_or_with_it_finishes(every, train_here, digits_flags):
    flags = [*digits_flags, "--epochs", "1", "--checkpoint-every", "10"]
    assert train_here(*flags, "--signal-every", every)["steps"] == 22


@pytest.mark.usefixtures("saved")
def test_a_signal_on_a_full_disk_does_not_ask_for_a_requeue(train_here, digits_flags):
    # As above: the signals at step 5 stop the ranks at step 12.
    full = Path(digits_flags[-1]) / "checkpoints" / "step-000000012" / ".rank-0.pt"
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    flags = ["--epochs", "1", "--signal-every", "4", "--checkpoint-every", "5"]
    with pytest.raises(RecipeError, match=r"step 12 .*No space left on device"):
        train_here(*digits_flags, *flags)


def test_loader_processes_ignore_the_signals(train_here, photo_flags, monkeypatch):
    signalled = set()

    def signal_loaders(state, file):
        for process in multiprocessing.active_children():
            for number in interruption.SIGNALS:
                os.kill(process.pid, number)
            signalled.add(process.pid)

    monkeypatch.setattr(torch, "save", signal_loaders)
    flags = ["--model", "smallcnn", "--batch-size", "2", "--checkpoint-every", "1"]
    assert train_here(*photo_flags, *flags)["steps"] == 6
    assert signalled
