"""Files for clusters: they parse, agree with each other, and have what Slurm and Trainer need."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.run
import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from recipes.cluster import launch
from recipes.settings import read_settings
from recipes.signals import REQUEUE, SIGNALS
from tests.recipes.runs import RECIPES
from tests.support.commands import ROOT, run
from tests.support.patience import PATIENCE

CLUSTER = RECIPES / "cluster"
BATCH_SCRIPT = CLUSTER / "slurm.sbatch"


def test_scripts_and_manifests_are_clean():
    # Beside the interpreter, as pip installs it: the folder need not be in PATH.
    shellcheck = Path(sys.executable).parent / "shellcheck"
    run([shellcheck, "--shell=bash", "--severity=warning", BATCH_SCRIPT])
    run([sys.executable, "-m", "yamllint", "-d", "relaxed", *CLUSTER.glob("*.yaml")])


def test_schedulers_signal_the_script_and_requeue_on_the_code_of_the_ranks():
    text = BATCH_SCRIPT.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, flags=re.MULTILINE))
    # The launcher starts the ranks of a node.
    wanted = {"signal": "B:USR1@120", "open-mode": "append", "requeue": "", "ntasks-per-node": "1"}
    assert wanted.items() <= options.items()
    assert f"\nrequeue={REQUEUE}\n" in text
    template = read_yaml("runtime.yaml")["spec"]["template"]["spec"]
    (replicated,) = template["replicatedJobs"]
    exit_code, _ = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    assert exit_code["onExitCodes"]["values"] == [REQUEUE]


SIGNAL = 'if [ "$1" = show ]; then kill -USR1 "$SCRIPT"; fi'


@pytest.mark.parametrize(("scontrol", "srun"), [(SIGNAL, ""), ("", f"exit {REQUEUE}")])
def test_a_signal_before_the_ranks_start_or_a_code_of_theirs_requeues_the_job(
    scontrol, srun, tmp_path
):
    for name, body in (("srun", srun), ("scontrol", scontrol)):
        (tmp_path / name).write_text(f'#!/bin/bash\necho "{name} $*" >>{tmp_path}/calls\n{body}\n')
        (tmp_path / name).chmod(0o755)
    names = ["SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_GPUS_ON_NODE", "SLURM_CPUS_PER_TASK"]
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **dict.fromkeys(names, "1")}
    command = ["bash", "-c", f'SCRIPT=$$ exec bash "{BATCH_SCRIPT}"']
    environment = os.environ | variables | {"SLURM_JOB_ID": "7"}
    assert subprocess.run(command, cwd=ROOT, env=environment).returncode == REQUEUE
    calls = [line.split()[:2] for line in (tmp_path / "calls").read_text().splitlines()]
    assert [calls[0], calls[-1]] == [["scontrol", "show"], ["scontrol", "requeue"]]
    assert (len(calls) == 2) == (scontrol == SIGNAL)


def read_yaml(name):
    return yaml.safe_load((CLUSTER / name).read_text())


def test_the_job_starts_the_launcher_with_valid_flags_and_the_nccl_settings():
    trainer = read_yaml("trainjob.yaml")["spec"]["trainer"]
    assert trainer["command"][1:] == ["-m", launch.__spec__.name]
    assert trainer["args"][:2] == ["-m", "recipes.train"]
    settings = read_settings(trainer["args"][2:])
    assert settings.auto_resume
    assert settings.checkpoint_every > 0
    # What the batch script exports, to jobs that were submitted with the variables.
    command = "env -i INTERFACE=eth0 bash -c 'set -a; source nccl_25g.env; env'"
    lines = run(["bash", "-c", command], cwd=CLUSTER).stdout.splitlines()
    pairs = dict(line.split("=", 1) for line in lines if line.startswith(("NCCL_", "GLOO_")))
    assert {entry["name"]: entry["value"] for entry in trainer["env"]} == pairs


@pytest.fixture
def ended_by(monkeypatch):
    """Call the launcher, whose ranks end with these codes, and return how it ends."""
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def call(codes, argv=("script.py",)):
        failures = {r: ProcessFailure(r, 0, code, "") for r, code in enumerate(codes)}

        def main(argv):
            raise ChildFailedError("recipes.train", failures)

        monkeypatch.setattr(torch.distributed.run, "main", main)
        with pytest.raises((SystemExit, ChildFailedError)) as ended:
            launch.main(list(argv))
        return ended.value

    yield call
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_launcher_exits_with_the_code_of_interrupted_ranks_alone(ended_by):
    # torchrun stopped the second rank; both ranks were starting.
    for codes in ([REQUEUE], [REQUEUE, -signal.SIGTERM], [-signal.SIGUSR1] * 2):
        assert ended_by(codes).code == REQUEUE
        # A signal while Python ends must not change the code.
        assert {signal.getsignal(number) for number in SIGNALS} == {signal.SIG_IGN}
    for codes in ([1], [1, REQUEUE], [-signal.SIGKILL, -signal.SIGTERM]):
        assert isinstance(ended_by(codes), ChildFailedError)


def test_the_launcher_refuses_restarts_by_torchrun(ended_by, monkeypatch):
    assert "--max-restarts" in ended_by([1], ["--max-restarts", "3", "script.py"]).code
    monkeypatch.setenv("PET_MAX_RESTARTS", "2")
    assert "--max-restarts" in ended_by([1]).code


# In place of torch: waits in C, where Python runs no handler, for a lock that nobody releases.
TORCH_THAT_WAITS = """
import ctypes, os, signal, threading
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
lock(mutex), lock(mutex)
"""


def test_a_signal_while_the_launcher_starts_asks_for_a_requeue(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH_THAT_WAITS)
    command = [sys.executable, "-m", "recipes.cluster.launch", "script.py"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert (
        subprocess.run(command, cwd=ROOT, env=environment, timeout=PATIENCE).returncode == REQUEUE
    )
