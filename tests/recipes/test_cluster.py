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
from tests.recipes.forked_ranks import RECIPES
from tests.support.commands import ROOT, run
from tests.support.patience import PATIENCE

CLUSTER = RECIPES / "cluster"
BATCH_SCRIPT = CLUSTER / "slurm.sbatch"
SHELL_SCRIPTS = [BATCH_SCRIPT, *(Path(__file__).parent / "slurm_stand_ins").iterdir()]


# Slurm.


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_parse(script):
    run(["bash", "-n", script])


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_pass_shellcheck(script):
    # Beside the interpreter, as pip installs it: the folder need not be in PATH.
    shellcheck = Path(sys.executable).parent / "shellcheck"
    run([shellcheck, "--shell=bash", "--severity=warning", script])


def test_slurm_signals_the_batch_script_and_may_requeue_it():
    text = BATCH_SCRIPT.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, flags=re.MULTILINE))
    assert options["signal"] == "B:USR1@120"
    assert options["open-mode"] == "append"
    assert options["requeue"] == ""
    assert (options["nodes"], options["gpus-per-node"]) == ("8", "8")
    # The launcher starts the ranks of a node.
    assert options["ntasks-per-node"] == "1"
    assert f"\nrequeue={REQUEUE}\n" in text


def batch_script(tmp_path, cwd, scontrol):
    """Run the batch script with an ``srun`` that ends at once, and with a ``scontrol``.

    Returns:
        The exit code, what the script has printed, and the calls of both commands.
    """
    for name, body in (("srun", ""), ("scontrol", scontrol)):
        (tmp_path / name).write_text(f'#!/bin/bash\necho "{name} $*" >>{tmp_path}/calls\n{body}\n')
        (tmp_path / name).chmod(0o755)
    names = ["SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_GPUS_ON_NODE", "SLURM_CPUS_PER_TASK"]
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **dict.fromkeys(names, "1")}
    ended = subprocess.run(
        ["bash", "-c", f'SCRIPT=$$ exec bash "{BATCH_SCRIPT}"'],
        cwd=cwd,
        env=os.environ | variables | {"SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    calls = tmp_path / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    return ended.returncode, ended.stdout + ended.stderr, lines


def test_a_signal_before_the_ranks_start_requeues_the_job(tmp_path):
    signal_the_script = 'if [ "$1" = show ]; then kill -USR1 "$SCRIPT"; fi'
    code, _, calls = batch_script(tmp_path, ROOT, signal_the_script)
    assert code == REQUEUE
    assert calls == ["scontrol show hostnames 1", "scontrol requeue 7"]


def nccl_settings(interface, *more):
    """Return what the batch script exports, to jobs that were submitted with the variables."""
    variables = " ".join([f"INTERFACE={interface}", *more])
    command = f"env -i {variables} bash -c 'set -a; source nccl_25g.env; env'"
    lines = run(["bash", "-c", command], cwd=CLUSTER).stdout.splitlines()
    pairs = dict(line.split("=", 1) for line in lines)
    return {name: value for name, value in pairs.items() if name.startswith(("NCCL_", "GLOO_"))}


# Kubernetes.


@pytest.fixture
def job():
    return read_yaml("trainjob.yaml")


@pytest.fixture
def runtime():
    return read_yaml("runtime.yaml")


def read_yaml(name):
    content = yaml.safe_load((CLUSTER / name).read_text())
    assert content["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    return content


@pytest.mark.parametrize("manifest", sorted(CLUSTER.glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_pass_yamllint(manifest):
    rules = "{extends: default, rules: {document-start: disable, line-length: {max: 100}, "
    rules += "braces: {max-spaces-inside: 1}, comments: {min-spaces-from-content: 1}}}"
    run([sys.executable, "-m", "yamllint", "--strict", "-d", rules, manifest])


def only_job(template):
    """Return the spec of the only Kubernetes job in a runtime, or in a patch of one."""
    (replicated,) = template["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    spec = replicated["template"]["spec"]
    return spec


def test_the_job_starts_the_launcher_with_valid_flags(job):
    trainer = job["spec"]["trainer"]
    assert trainer["command"][1:] == ["-m", launch.__spec__.name]
    assert trainer["args"][:2] == ["-m", "recipes.train"]
    settings = read_settings(trainer["args"][2:])
    assert settings.auto_resume
    assert settings.checkpoint_every > 0


def test_the_job_has_the_nccl_settings_of_the_batch_script(job):
    found = {entry["name"]: entry["value"] for entry in job["spec"]["trainer"]["env"]}
    assert found == nccl_settings("eth0")


def test_the_runtime_restarts_interrupted_jobs(runtime):
    assert runtime["kind"] == "ClusterTrainingRuntime"
    assert runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] == "torch"
    assert runtime["spec"]["mlPolicy"]["torch"] == {}
    template = runtime["spec"]["template"]
    (rule,) = template["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    spec = only_job(template)
    exit_code, disruption = spec["podFailurePolicy"]["rules"]
    assert exit_code["onExitCodes"]["values"] == [REQUEUE]
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert {exit_code["action"], disruption["action"]} == {"FailJob"}
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


# The launcher.


@pytest.fixture
def _handlers():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def end_ranks_with(codes, monkeypatch):
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=0, exitcode=code, error_file="")
        for rank, code in enumerate(codes)
    }

    def main(argv):
        raise ChildFailedError("recipes.train", failures)

    monkeypatch.setattr(torch.distributed.run, "main", main)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize(
    "codes",
    [
        [REQUEUE],
        [REQUEUE, -signal.SIGTERM],  # torchrun stopped the second rank
        [-signal.SIGUSR1, -signal.SIGUSR1],  # both ranks were starting
    ],
)
def test_the_launcher_exits_with_the_code_of_interrupted_ranks(codes, monkeypatch):
    end_ranks_with(codes, monkeypatch)
    with pytest.raises(SystemExit) as exit_:
        launch.main(["script.py"])
    assert exit_.value.code == REQUEUE
    # A signal while Python ends must not change the code.
    assert {signal.getsignal(number) for number in SIGNALS} == {signal.SIG_IGN}


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("codes", [[1], [1, REQUEUE], [-signal.SIGKILL, -signal.SIGTERM]])
def test_the_launcher_reports_other_failures_as_torchrun_does(codes, monkeypatch):
    end_ranks_with(codes, monkeypatch)
    with pytest.raises(ChildFailedError):
        launch.main(["script.py"])


# In place of torch: waits in C, where Python runs no handler, for a lock that nobody releases.
TORCH_THAT_WAITS = """
import ctypes, os, signal, threading
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
lock(mutex), lock(mutex)
"""


def test_a_signal_while_the_launcher_starts_asks_for_a_requeue(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH_THAT_WAITS)
    ended = subprocess.run(
        [sys.executable, "-m", "recipes.cluster.launch", "script.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        timeout=PATIENCE,
    )
    assert ended.returncode == REQUEUE


def test_a_signal_after_the_ranks_have_ended_does_not_ask_for_a_requeue(monkeypatch):
    reader, writer = os.pipe()
    os.write(writer, bytes([signal.SIGUSR1] * 2))
    os.close(writer)
    children, passed_on, exits = iter([[17], []]), list[int](), list[int]()
    monkeypatch.setattr(launch, "_children", lambda: next(children))
    monkeypatch.setattr(os, "kill", lambda pid, number: passed_on.append(pid))
    monkeypatch.setattr(os, "_exit", exits.append)
    with pytest.raises(IndexError):  # the pipe is closed
        launch._pass_on(reader)
    os.close(reader)
    assert (passed_on, exits) == ([17], [])


def error_of_the_launcher(argv, monkeypatch):
    """Return the message with which the launcher ends before it starts a rank."""
    end_ranks_with([1], monkeypatch)
    with pytest.raises(SystemExit) as exit_:
        launch.main(argv)
    assert isinstance(exit_.value.code, str)
    return exit_.value.code


@pytest.mark.usefixtures("_handlers")
def test_the_launcher_refuses_restarts_by_torchrun(monkeypatch):
    flags = ["--max-restarts", "3", "script.py"]
    assert "--max-restarts" in error_of_the_launcher(flags, monkeypatch)
    monkeypatch.setenv("PET_MAX_RESTARTS", "2")
    assert "--max-restarts" in error_of_the_launcher(["script.py"], monkeypatch)
