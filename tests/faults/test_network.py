"""A link that is lost, half open, or loses packets, between hosts that are network namespaces."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.net.hosts import Hosts
from benchmarks.net.shell import ShellError, missing
from benchmarks.net.shell import run as shell
from tests.faults.clients import STEPS
from tests.faults.ranks import VICTIM, Case, Outcome, Place, run
from tests.faults.test_processes import assert_ended, assert_equal_replicas

pytestmark = pytest.mark.soak
RANKS, PORT = 3, 29500


class LossyHosts(Hosts):
    """Hosts whose switch can lose frames."""

    def __init__(self) -> None:
        super().__init__(RANKS, mbit=1000, delay_us=0)

    def _start_switch(self) -> None:
        program = Path(__file__).with_name("lossy_switch.py")
        ports = [f"p{host}" for host in range(self.count)]
        self._switch = subprocess.Popen(
            ["ip", "netns", "exec", self._hub, sys.executable, program, *ports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if self._switch.stdout.readline() != "ready\n":
            raise ShellError("the switch did not start")

    def close(self) -> None:
        switch = self._switch
        super().close()
        if switch is not None:
            switch.stdin.close()
            switch.stdout.close()

    def tell(self, line: str) -> int:
        """Command the switch, and return the number of frames that it has lost."""
        self._switch.stdin.write(f"{line}\n")
        self._switch.stdin.flush()
        return int(self._switch.stdout.readline())

    def places(self) -> list[Place]:
        store = (self.address(0), PORT)
        return [
            Place(self._name(host), self.interface, store, host == 0) for host in range(self.count)
        ]

    def link_down(self) -> None:
        shell("ip", "-n", self._hub, "link", "set", f"p{VICTIM}", "down")

    def half_open(self) -> None:
        self.tell(f"cut {VICTIM}")

    def lose_packets(self) -> None:
        self.tell("loss 0.3")


@pytest.fixture
def hosts() -> Iterator[LossyHosts]:
    """Hosts that are made and removed here."""
    reason = missing()
    try:
        context = None if reason else LossyHosts().__enter__()
    except ShellError as error:
        reason = str(error)
    if reason:
        pytest.skip(f"no network namespaces here: {reason}")
    yield context
    context.close()


def trained(
    case: Case, folder: Path, hosts: LossyHosts, timeout: float, change: Callable[[], None] | None
) -> list[Outcome]:
    folder.mkdir()
    return run(case, folder, timeout, hosts.places(), change)


@pytest.mark.parametrize("place", ["connect", "bucket 1", "finish", "between steps", "gather"])
@pytest.mark.parametrize("change", ["link_down", "half_open"])
def test_a_lost_link_ends_all_ranks_within_the_timeout(
    change: str, place: str, hosts: LossyHosts, tmp_path: Path
) -> None:
    case = Case("ddp", place, "network")
    outcomes = trained(case, tmp_path / "run", hosts, 8, getattr(hosts, change))
    assert_ended(case, outcomes, timeout=8)
    assert_equal_replicas(case, outcomes)
    # The rank behind the link, whose store is behind it as well.
    victim = outcomes[VICTIM]
    assert (victim.code, victim.type, victim.unchanged) == (0, "RankFailureError", True)
    assert f"failed on rank {VICTIM}" in victim.message
    assert victim.seconds < 8 + 15


def test_training_goes_on_with_the_same_bits_while_packets_are_lost(
    hosts: LossyHosts, tmp_path: Path
) -> None:
    whole = trained(Case("ddp", "bucket 1", "none"), tmp_path / "whole", hosts, 60, None)
    case = Case("ddp", "bucket 1", "network")
    lossy = trained(case, tmp_path / "lossy", hosts, 60, hosts.lose_packets)
    for one, other in zip(lossy, whole, strict=True):
        assert (one.error, one.code, one.step) == ([], 0, STEPS)
        assert torch.equal(one.weights, other.weights)
    assert hosts.tell("loss 0") > 10
