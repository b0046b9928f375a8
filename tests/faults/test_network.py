"""A link that is lost between hosts that are network namespaces."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.net.hosts import Hosts
from benchmarks.net.shell import ShellError
from benchmarks.net.shell import run as shell
from tests.faults.ranks import VICTIM, Case, Place, run
from tests.faults.test_processes import MARGIN, assert_ended, assert_equal_replicas

pytestmark = pytest.mark.soak
RANKS, PORT, TIMEOUT = 3, 29500, 8


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        made = Hosts(RANKS, mbit=1000, delay_us=0).__enter__()
    except ShellError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.close()


@pytest.mark.parametrize("place", ["connect", "bucket 1", "finish", "between steps", "gather"])
def test_a_lost_link_ends_all_ranks_within_the_timeout(
    place: str, hosts: Hosts, tmp_path: Path
) -> None:
    def link_down() -> None:
        # At the switch: the connections of the host swallow all packets.
        shell("ip", "-n", hosts._hub, "link", "set", f"p{VICTIM}", "down")

    store = (hosts.address(0), PORT)
    places = [Place(hosts._name(host), hosts.interface, store, host == 0) for host in range(RANKS)]
    case = Case("ddp", place, "network")
    outcomes = run(case, tmp_path, TIMEOUT, places, link_down)
    assert_ended(case, outcomes, TIMEOUT)
    assert_equal_replicas(case, outcomes)
    # The rank behind the link, whose store is behind it as well.
    victim = outcomes[VICTIM]
    assert (victim.code, victim.type, victim.unchanged) == (0, "RankFailureError", True)
    assert f"failed on rank {VICTIM}" in victim.message
    assert victim.seconds < TIMEOUT + MARGIN
