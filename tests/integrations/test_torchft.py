"""torchft: a rank is killed and comes back, another leaves, and the others go on."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from tests.integrations.scripts import integrations
from tests.support.commands import ROOT
from tests.support.patience import PATIENCE

pytestmark = [integrations, pytest.mark.filterwarnings("ignore")]


class Job:
    """The ranks of a lighthouse, each a process that writes a line for each step."""

    def __init__(self, lighthouse, spec, folder):
        own = {"TORCHFT_LIGHTHOUSE": lighthouse, "GLOO_SOCKET_IFNAME": "lo"}
        self._environment = {**os.environ, **own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._spec, self._folder = spec, folder
        self.processes: dict[str, subprocess.Popen] = {}

    def start(self, name):
        command = [sys.executable, "-m", "recipes.integrations.torchft_train", "--name", name]
        command += ["--compress", self._spec, "--steps", "100000", "--out", str(self._folder)]
        with (self._folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )

    def lines(self, name):
        path = self._folder / f"{name}.jsonl"
        # A process that is killed leaves half a line.
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines() if line.endswith("}")]

    def wait_for_steps(self, name, ranks):
        """Wait until a rank has taken some steps more, all with this number of ranks."""
        deadline = time.monotonic() + PATIENCE
        while [line["ranks"] for line in self.lines(name)][-5:] != [ranks] * 5:
            assert time.monotonic() < deadline, {name: self.lines(name)[-3:] for name in "abc"}
            for each, process in self.processes.items():
                log = (self._folder / f"{each}.log").read_text()
                assert process.poll() in (None, 0), log[-3000:]
            time.sleep(0.1)


@contextmanager
def job(spec, folder):
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000
    )
    running = Job(lighthouse.address(), spec, folder)
    try:
        yield running
    finally:
        for process in running.processes.values():
            process.kill()
            process.wait()
        lighthouse.shutdown()


@pytest.mark.parametrize("spec", ["ef(topk(0.01))", "bidirectional(topk(0.01), topk(0.01))"])
def test_ranks_die_join_and_leave_and_the_others_go_on(spec, tmp_path):
    with job(spec, tmp_path) as ranks:
        for name in "abc":
            ranks.start(name)
        ranks.wait_for_steps("a", 3)
        killed = ranks.processes.pop("b")
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        ranks.wait_for_steps("a", 2)
        ranks.start("b")
        ranks.wait_for_steps("a", 3)
        ranks.wait_for_steps("b", 3)
        ranks.processes["c"].send_signal(signal.SIGTERM)
        ranks.processes["c"].wait(PATIENCE)
        ranks.wait_for_steps("a", 2)
        lines = {name: ranks.lines(name) for name in "abc"}
        assert ranks.processes["c"].returncode == 0
    # The others have taken every step once, in one process, and all weights are equal.
    steps = [line["step"] for line in lines["a"]]
    assert steps == list(range(steps[0], steps[-1] + 1))
    weights = {line["step"]: line["weights"] for line in lines["a"]}
    for line in (*lines["b"], *lines["c"]):
        assert weights.get(line["step"], line["weights"]) == line["weights"]
    assert lines["c"][-1]["residual"] == 0
    assert lines["b"][-1]["residual"] > 0
