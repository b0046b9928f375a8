"""Hosts: network namespaces, each behind a shaped link to one switch that adds delay.

Every host has its own interface, TCP stack and counters. The kernel's tbf shapes its uplink. The
switch (netdelay.c) then serialises and delays every frame exactly, in both directions.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from benchmarks.net.shell import ShellError, missing, run

_SOURCE = Path(__file__).with_name("netdelay.c")
# tbf gives TCP the back-pressure of a real network card, but lets short messages pass in a free
# burst. The switch has no such burst. This burst size must hold one large TCP segment as a whole.
_LEAST_BURST, _LARGEST_BURST = 66_000, 1_250_000
# The switch in netdelay.c has this many ports.
_MOST = 32


class Hosts:
    """A context with `count` hosts on links of `mbit` Mbit/s, with `delay_us` one way."""

    interface = "eth0"

    def __init__(self, count: int, mbit: int, delay_us: int) -> None:
        lacking = missing()
        if lacking:
            raise ShellError(lacking)
        if not 2 <= count <= _MOST:
            raise ShellError(f"{count} hosts are not possible: choose from 2 to {_MOST}")
        self.count, self.mbit, self.delay_us = count, mbit, delay_us
        self._prefix = f"tcb{os.getpid()}x"
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Hosts":
        # A run that was killed with SIGKILL could not remove its hosts.
        _remove_orphans()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def inside(self, host: int) -> list[str]:
        """The command prefix that runs a program on `host`."""
        return ["ip", "netns", "exec", self._name(host)]

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def close(self) -> None:
        """Remove every host. Calling it again has no effect."""
        if self._switch is not None:
            self._switch.terminate()
            self._switch.wait(timeout=10)
            if self._switch.stdout is not None:
                self._switch.stdout.close()
            self._switch = None
        _remove(name for name in _namespaces() if name.startswith(self._prefix))

    def _name(self, host: int) -> str:
        return f"{self._prefix}h{host}"

    @property
    def _hub(self) -> str:
        return f"{self._prefix}hub"

    def _build(self) -> None:
        _add_namespace(self._hub)
        for host in range(self.count):
            _add_namespace(self._name(host))
            self._connect(host)
        self._start_switch()

    def _connect(self, host: int) -> None:
        name, eth, own = self._name(host), self.interface, self.address(host)
        _batch(
            name,
            f"link add {eth} type veth peer name p{host} netns {self._hub}",
            f"link set {eth} address {_mac(host)}",
            f"addr add {own}/24 dev {eth}",
            f"link set {eth} up",
            # Set congestion control per route: the system's default can be another one, and some
            # kernels cannot change it within a namespace.
            f"route replace 10.77.0.0/24 dev {eth} src {own} congctl cubic",
            # Fixed neighbours: no ARP traffic in the counters.
            *(
                f"neigh replace {self.address(other)} lladdr {_mac(other)} dev {eth} nud permanent"
                for other in range(self.count)
                if other != host
            ),
        )
        _batch(self._hub, f"link set p{host} up")
        burst = min(max(self.mbit * 125, _LEAST_BURST), _LARGEST_BURST)
        shape = f"rate {self.mbit}mbit burst {burst} latency 100ms".split()
        run("tc", "-n", name, "qdisc", "replace", "dev", eth, "root", "tbf", *shape)

    def _start_switch(self) -> None:
        ports = [f"p{host}" for host in range(self.count)]
        with tempfile.TemporaryDirectory() as folder:
            program = f"{folder}/netdelay"
            run("gcc", "-O2", "-o", program, str(_SOURCE))
            command = [program, str(self.delay_us), str(self.mbit), *ports]
            self._switch = subprocess.Popen(
                ["ip", "netns", "exec", self._hub, *command],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            assert self._switch.stdout is not None
            if self._switch.stdout.readline() != "ready\n":
                raise ShellError("the switch (netdelay) did not start: see its message above")


def _mac(host: int) -> str:
    return f"02:00:00:00:07:{host:02x}"


def _add_namespace(name: str) -> None:
    run("ip", "netns", "add", name)
    _batch(name, "link set lo up")
    # Without IPv6 the host sends no address or router requests, so only the run's bytes count.
    quiet = "for f in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 1 >$f; done"
    run("ip", "netns", "exec", name, "sh", "-c", f"[ ! -d /proc/sys/net/ipv6 ] || {{ {quiet}; }}")


def _batch(namespace: str, *commands: str) -> None:
    run("ip", "-n", namespace, "-batch", "-", text="\n".join(commands) + "\n")


def _namespaces() -> list[str]:
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.strip()]


def _remove(names: Iterable[str]) -> None:
    for name in names:
        run("ip", "netns", "del", name)


def _remove_orphans() -> None:
    """Remove the hosts of benchmarks whose process no longer exists."""
    for name in _namespaces():
        owner = re.fullmatch(r"tcb(\d+)x(?:hub|h\d+)", name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _remove([name])
