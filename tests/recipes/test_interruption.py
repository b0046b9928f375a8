"""SIGUSR1 and SIGTERM end a run after a checkpoint. The resumed run ends with the same bits."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from recipes import interruption
from recipes.errors import RecipeError
from recipes.signals import REQUEUE, SIGNALS
from tests.recipes.runs import assert_equal_runs, steps_of, train_rank
from tests.support.cases import only
from tests.support.patience import PATIENCE
from tests.support.ranks import on_processes

# 22 steps per epoch. The ranks ask each other at steps 3, 6, ..., mostly inside a round of 4.
FLAGS = ["--threads", "1", "--epochs", "4", "--log-every", "1", "--eval-every", "4"]
FLAGS += ["--bn-images", "0", "--signal-every", "3", "--auto-resume"]
FLAGS += ["--sync", "every(4)", "--compress", "ef(topk(0.01))", "--out"]


@pytest.mark.parametrize(
    ("number", "signalled"),
    [(signal.SIGTERM, [1]), pytest.param(signal.SIGUSR1, [0, 1], marks=pytest.mark.thorough)],
)
def test_all_ranks_stop_at_one_step_and_resume_with_the_same_bits(number, signalled, tmp_path, out):
    flags = [*FLAGS, str(out)]
    # The signals at step 25 are known at the question of step 27, and end the run at step 30.
    assert on_processes(2, train_rank, flags, number, 25, signalled) == [(1, REQUEUE)] * 2
    assert steps_of(out) == [30]
    assert not (out / "summary.json").exists()
    assert on_processes(2, train_rank, flags) == [(31, 0)] * 2
    assert on_processes(2, train_rank, [*FLAGS, str(tmp_path / "whole")]) == [(1, 0)] * 2
    assert_equal_runs(tmp_path / "whole", out)


@pytest.mark.thorough
def test_a_signal_to_the_launcher_reaches_the_ranks(out):
    command = [sys.executable, "-m", "recipes.cluster.launch", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "recipes.train", *FLAGS, str(out), "--epochs", "400"]
    launcher = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + PATIENCE
        while not (out / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        launcher.terminate()
        assert launcher.wait(PATIENCE) == REQUEUE
    finally:
        launcher.kill()
    assert len(steps_of(out)) == 1


# One rank, in this process.


@pytest.fixture
def saved(monkeypatch):
    """Signal this process before and after it saves, and list what it saves."""
    save, saved = torch.save, []

    def save_between_signals(state, file):
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        save(state, file)
        for number in SIGNALS:
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
def test_a_signal_on_a_full_disk_does_not_ask_for_a_requeue(train_here, digits_flags, out):
    # As above: the signals at step 5 stop the ranks at step 12.
    full = out / "checkpoints" / "step-000000012" / ".rank-0.pt"
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    flags = ["--epochs", "1", "--signal-every", "4", "--checkpoint-every", "5"]
    with pytest.raises(RecipeError, match=r"step 12 .*No space left on device"):
        train_here(*digits_flags, *flags)


def test_loader_processes_ignore_the_signals(train_here, photo_flags, monkeypatch):
    signalled = set()

    def signal_loaders(state, file):
        for process in multiprocessing.active_children():
            for number in SIGNALS:
                os.kill(process.pid, number)
            signalled.add(process.pid)

    monkeypatch.setattr(torch, "save", signal_loaders)
    flags = ["--model", "smallcnn", "--batch-size", "2", "--checkpoint-every", "1"]
    assert train_here(*photo_flags, *flags)["steps"] == 6
    assert signalled


def test_a_timeout_is_that_of_the_process_group(train_here, digits_flags, monkeypatch):
    begin, seen = dist.init_process_group, []

    def noted(*arguments, **options):
        seen.append(options["timeout"])
        begin(*arguments, **options)

    monkeypatch.setattr(dist, "init_process_group", noted)
    for timeout in ("0", "7"):
        train_here(*digits_flags, "--epochs", "1", "--auto-resume", "--timeout", timeout)
    assert [each and each.seconds for each in seen] == [None, 7]
