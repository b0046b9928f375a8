"""Doctor on real jobs: planted faults are found and named, and healthy jobs have none.

Ranks on the loopback are started by one torchrun, through a shell that plants the fault. Ranks on
hosts are network namespaces (see benchmarks/net/hosts.py) with a torchrun each.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.net.hosts import Hosts
from benchmarks.net.shell import missing
from benchmarks.net.shell import run as shell

ROOT = Path(__file__).parents[3]
_LIMIT = 240  # seconds for a job
_EPHEMERAL = "0x8000"  # the ports that systems choose have this bit

# Sets the clock of a process one minute ahead.
_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, t);
    if (id == CLOCK_REALTIME) t->tv_sec += 60;
    return code;
}
"""


class DoctorHosts(Hosts):
    """Hosts whose links can be slowed down and cut, each direction by itself."""

    def slow_down(self, host, mbit, to=None):
        if to is None:
            self._tc(host, f"qdisc replace dev {self.interface} root {_shaped(mbit)}")
        else:
            self._divert(host, _shaped(mbit), self._to(to))

    def cut(self, host, to):
        self._divert(host, "blackhole", self._to(to))

    def block_ports(self, host):
        """Lose what opens a connection to a high port of a host, as many firewalls do."""
        opens = "match ip protocol 6 0xff match u8 0x02 0x12 at 33"
        match = f"{self._to(host)} {opens} match ip dport {_EPHEMERAL} {_EPHEMERAL}"
        for other in {*range(self.count)} - {host}:
            self._divert(other, "blackhole", match)

    def _to(self, host):
        return f"match ip dst {self.address(host)}/32"

    def _divert(self, host, qdisc, match):
        """Send what matches through another queue."""
        rate, device = f"rate {self.mbit}mbit burst 70kb cburst 70kb", self.interface
        self._tc(host, f"qdisc replace dev {device} root handle 1: htb default 1")
        for number in (1, 2):
            self._tc(host, f"class add dev {device} parent 1: classid 1:{number} htb {rate}")
        self._tc(host, f"qdisc add dev {device} parent 1:2 {qdisc}")
        self._tc(host, f"filter add dev {device} parent 1: protocol ip u32 {match} flowid 1:2")

    def _tc(self, host, line):
        shell("tc", "-n", self._name(host), *line.split())


def _shaped(mbit):
    return f"tbf rate {mbit}mbit burst 66000 latency 100ms"


@dataclass(frozen=True)
class Case:
    """A job, and the code and ranks of what doctor has to find; none for a healthy job."""

    name: str
    code: str = ""
    ranks: tuple[int, ...] = ()
    world_size: int = 3
    mbit: int = 0  # speed of the links of hosts; 0 for ranks on the loopback
    plant: str = ""  # on the loopback, shell commands of the last rank, before it becomes doctor
    arrange: Callable[[DoctorHosts], None] = lambda hosts: None  # for hosts, plants the fault


def _dead_link(hosts):
    hosts.cut(1, 2)
    hosts.cut(2, 1)


_OTHER_VERSION = """
cp -r "$ROOT/torchcomp" "$FOLDER/torchcomp"
echo '__version__ = "0.0.9"' > "$FOLDER/torchcomp/specs/version.py"
cd "$FOLDER"; export PYTHONPATH="$FOLDER"
"""
_NO_NUMBA = """
mkdir "$FOLDER/numba"; echo 'raise ImportError("planted")' > "$FOLDER/numba/__init__.py"
export PYTHONPATH="$FOLDER:$PYTHONPATH"
"""
_SMALL_SHM = """
exec unshare --mount sh -c 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"' sh "$@"
"""
# Runs for a tenth of the time, as in a container with a limit. Not from the start: its links would
# be slow as well.
_THROTTLED = """
rank=$$
(
    until grep -q "computing on all ranks" "$FOLDER/err0"; do sleep 0.02; done
    while kill -STOP $rank; do sleep 0.09; kill -CONT $rank; sleep 0.01; done
) 2>/dev/null &
"""
_SKEWED = 'gcc -shared -fPIC -o "$FOLDER/clock.so" "$FOLDER/clock.c" -ldl\n'
_SKEWED += 'export LD_PRELOAD="$FOLDER/clock.so"\n'

FAULTS = (
    Case("one slow link", "slow-link", (1, 2), 4, 200, arrange=lambda h: h.slow_down(1, 10, to=2)),
    Case("one dead link", "dead-link", (1, 2), 4, 200, arrange=_dead_link),
    Case("ports blocked", "blocked-port", (2,), 4, 200, arrange=lambda h: h.block_ports(2)),
    Case("one slow host", "slow-links", (2,), 4, 200, arrange=lambda h: h.slow_down(2, 20)),
    Case("one slow rank", "slow-rank", (2,), plant=_THROTTLED),
    Case("two versions", "versions", (2,), plant=_OTHER_VERSION),
    Case("small /dev/shm", "shm", (2,), plant=_SMALL_SHM),
    Case("other number of threads", "threads", (2,), plant="export OMP_NUM_THREADS=2\n"),
    Case("clock one minute ahead", "clock", (2,), plant=_SKEWED),
    Case("no Numba", "kernels", (2,), plant=_NO_NUMBA),
)

HEALTHY = (
    *(Case(f"loopback, run {run}", world_size=2 + run % 3) for run in range(10)),
    *(
        Case(f"{mbit} Mbit/s, {ranks} hosts", world_size=ranks, mbit=mbit)
        for ranks in (2, 4)
        for mbit in (10, 50, 100, 500, 1000)
    ),
)


def examined(case, folder):
    """Run doctor; return its JSON, the statuses of each torchrun, and what it printed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    doctor = ["-m", "torchcomp", "doctor", "--json", f"{folder}/doctor.json"]
    (folder / "clock.c").write_text(_CLOCK)
    if not case.mbit:
        script, last = folder / "start.sh", case.world_size - 1
        script.write_text(f'if [ "$RANK" = {last} ]; then\n:\n{case.plant}fi\nexec "$@"\n')
        ranks = ["--standalone", "--nproc-per-node", str(case.world_size), "--no-python"]
        command = [*torchrun, *ranks, "sh", str(script), sys.executable, *doctor]
        return _finished([command], folder, "lo")
    with DoctorHosts(case.world_size, case.mbit, delay_us=100) as hosts:
        case.arrange(hosts)
        job = ["--nnodes", str(hosts.count), "--nproc-per-node", "1"]
        job += ["--master-addr", hosts.address(0), "--master-port", "29500"]
        commands = [
            [*hosts.inside(host), *torchrun, *job, "--node-rank", str(host), *doctor]
            for host in range(case.world_size)
        ]
        return _finished(commands, folder, hosts.interface)


def _finished(commands, folder, interface):
    own = {"FOLDER": str(folder), "ROOT": str(ROOT), "PYTHONPATH": str(ROOT)}
    own |= {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    began, jobs = time.monotonic(), list[subprocess.Popen[bytes]]()
    try:
        for number, command in enumerate(commands):
            with (folder / f"err{number}").open("wb") as log:
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                environment = {**os.environ, **own}
                options = {"cwd": ROOT, "env": environment, **streams}
                jobs.append(subprocess.Popen(command, start_new_session=True, **options))
        codes = {job.wait(max(1.0, began + _LIMIT - time.monotonic())) for job in jobs}
    finally:
        for job in jobs:
            # torchrun and all it started, also what a planted fault left.
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGTERM if job.poll() is None else signal.SIGKILL)
            job.wait()
    printed = "".join(path.read_text() for path in sorted(folder.glob("err*")))
    path = folder / "doctor.json"
    return json.loads(path.read_text()) if path.exists() else {}, codes, printed


@pytest.mark.soak
@pytest.mark.parametrize("case", [*FAULTS, *HEALTHY], ids=lambda case: case.name)
def test_doctor_finds_a_planted_fault_and_nothing_else(case, tmp_path):
    if missing():
        pytest.skip(missing())
    found, codes, printed = examined(case, tmp_path)
    assert "findings" in found, printed
    named = {(each["code"], *sorted(each["ranks"])) for each in found["findings"]}
    assert named == ({(case.code, *case.ranks)} if case.code else set()), printed
    # torchrun exits with 1 whatever the status of its processes is.
    assert codes == ({1} if case.code else {0})
