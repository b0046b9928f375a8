"""benchmarks/network.py on a few shaped hosts: the kernel and the handle count the same bytes."""

import csv
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

from benchmarks.net.hosts import Hosts
from benchmarks.net.shell import ShellError, missing
from tests.support.cases import thorough
from tests.support.patience import PATIENCE

TINY = ["--mbit", "1000", "--models", "mlp", "--seconds", "0.5"]
SPECS = ["mean", "ef(topk(0.1))"]


@pytest.fixture(scope="module")
def shaped_hosts():
    """Skip where hosts cannot be shaped."""
    reason = missing()
    try:
        if not reason:
            with Hosts(2, 100, 500):
                pass
    except ShellError as error:
        reason = str(error)
    if reason:
        pytest.skip(f"no shaped hosts here: {reason}")


class Run:
    """A run of network.py; a mark in the environment identifies every process that it starts."""

    def __init__(self, *arguments, **environment):
        self._mark = f"TORCHCOMP_TEST={uuid.uuid4()}"
        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.network", *arguments],
            env={**os.environ, name: value, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, seconds):
        """Wait; return the exit status, stdout and stderr."""
        try:
            output, errors = self.process.communicate(timeout=seconds)
        finally:
            self.process.terminate()
            self.process.wait(timeout=30)
        return self.process.returncode, output, errors

    def left_behind(self):
        """The namespaces and processes of the run that still exist."""
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        own = f"tcb{self.process.pid}x"
        found = [line for line in spaces.splitlines() if line.startswith(own)]
        for folder in Path("/proc").glob("[0-9]*"):
            # It may have ended meanwhile, or belong to another user.
            with suppress(OSError, ValueError):
                if self._mark.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_text())
        return found


@pytest.mark.usefixtures("shaped_hosts")
@pytest.mark.thorough
def test_the_kernel_counts_what_the_handle_counts_in_one_level_and_in_two(tmp_path):
    command = [*TINY, "--nodes", "--hosts", "2", "--ranks", "2", "--out", str(tmp_path), "--resume"]
    command += ["--methods", "ddp", "topq(0.1)", *SPECS]
    run = Run(*command)
    status, output, errors = run.finish(seconds=PATIENCE)
    # The others are measured. The error of the spec suggests the nearest name.
    assert status == 1, output + errors
    assert "topk" in errors
    assert errors.splitlines()[-1].startswith("failed: topq(0.1) ")
    with (tmp_path / "nodes.csv").open(newline="") as file:
        rows = {(row["method"], row["levels"]): row for row in csv.DictReader(file)}
    # PyTorch's hooks have one level.
    assert list(rows) == [("ddp", "1"), *product(SPECS, "12")]
    for (method, level), row in rows.items():
        link, inside = float(row["payload_bytes"]), float(row["inside_bytes"])
        # The queue of the link counts no bytes of the ranks within a host.
        assert link == pytest.approx(float(row["tcp_bytes"]), rel=0.03)
        assert float(row["wire_bytes"]) > link
        if method == "ddp":
            continue
        # Two ranks share the counters of a host. gloo's own headers are not in the handle's count.
        counted = 2 * float(row["counted_bytes"])
        if level == "1":
            assert link + inside == pytest.approx(counted, rel=0.03)
        else:
            assert link == pytest.approx(counted, rel=0.03)
            assert inside == pytest.approx(2 * float(row["counted_inside_bytes"]), rel=0.03)
    again = Run(*[word for word in command if word != "topq(0.1)"])
    assert again.finish(seconds=PATIENCE)[:2] == (0, "")
    assert run.left_behind() + again.left_behind() == []


@pytest.mark.usefixtures("shaped_hosts")
@pytest.mark.parametrize("number", [signal.SIGINT, *thorough([signal.SIGTERM])])
def test_an_interrupted_run_leaves_nothing_behind(number, tmp_path):
    endless = ["--least", "1000000"]
    run = Run(*TINY, "--hosts", "2", "--methods", "no-op", *endless, "--out", str(tmp_path))
    deadline = time.monotonic() + PATIENCE
    while not any("benchmarks.net.worker" in one for one in run.left_behind()):
        assert time.monotonic() < deadline, "no worker was started"
        time.sleep(0.1)
    run.process.send_signal(number)
    status, _, _ = run.finish(seconds=PATIENCE)
    # 128 + the signal's number, as in a shell.
    assert status in (130, 143)
    assert run.left_behind() == []


def test_a_machine_without_the_programs_gets_one_line(tmp_path):
    # An empty PATH has neither ip nor gcc. Without root, this is reported first.
    run = Run("--quick", "--out", str(tmp_path), PATH=str(tmp_path))
    status, output, errors = run.finish(seconds=PATIENCE)
    assert status == 1
    assert output == ""
    assert errors.count("\n") == 1
    assert errors.startswith("error: ")
    assert "iproute2" in errors or "root" in errors
