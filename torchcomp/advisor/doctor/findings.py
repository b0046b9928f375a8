"""Findings: what is wrong with a job, judged from what was measured. No measurement is made here.

Machines are noisy, so each bound is a ratio to what the same job reaches elsewhere.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchcomp.advisor.doctor.clocks import Clock
from torchcomp.advisor.doctor.facts import Facts
from torchcomp.advisor.doctor.job import ranks_named
from torchcomp.advisor.doctor.links import Link
from torchcomp.advisor.doctor.preflight import Unreachable
from torchcomp.advisor.doctor.speed import Speed
from torchcomp.advisor.units import duration, rate, size

SLOW_LINK = 2.0
"""A link is slow if the other links of its two ranks are this many times faster."""

LATE_LINK, LATE_SECONDS = 4.0, 1e-3
"""The same for its latency, which also must be this many seconds longer."""

SLOW_RANK = 1.3
"""A rank is slow if the best quarter of its times is this many times the worst of the others'."""

TCP_FASTEST = 2e9
"""Bytes per second above which a core, not the link, sets the pace of a TCP connection."""

SKEW = 0.1
"""Seconds by which clocks may differ."""

SHM = 128 * 2**20
"""Free bytes that /dev/shm should have: data loaders and NCCL use it."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        code: a short name that does not change between versions.
        ranks: the ranks that it is about.
        text: what is wrong, with ranks and numbers.
        advice: what to do.
        fatal: whether the job cannot train like this.
    """

    code: str
    ranks: tuple[int, ...]
    text: str
    advice: str
    fatal: bool = False


def of_connections(failed: Sequence[Unreachable]) -> list[Finding]:
    """Judge connections that failed: a finding per pair, or one for a rank that all of them share.

    Args:
        failed: the connections, each direction by itself.
    """
    pairs: dict[tuple[int, int], list[Unreachable]] = defaultdict(list)
    for each in failed:
        pairs[min(each.source, each.target), max(each.source, each.target)].append(each)
    shared = set.intersection(*map(set, pairs)) if len(pairs) > 1 else set[int]()
    if shared:
        return [_unreachable(tuple(shared), "the other ranks", list(failed))]
    return [
        _unreachable((one, other), f"rank {other}", ways)
        for (one, other), ways in sorted(pairs.items())
    ]


def _unreachable(ranks: tuple[int, ...], others: str, ways: Sequence[Unreachable]) -> Finding:
    tries = [
        f"rank {way.source} to rank {way.target} at {way.address}: {way.reason}" for way in ways
    ]
    both_ways = len({(way.target, way.source) for way in ways} & {*map(_ends, ways)})
    if any(way.host_answers for way in ways):
        code, what = "blocked-port", "a port is blocked"
        advice = "the host answers, so a firewall blocks ports: open all TCP ports between nodes"
    elif not both_ways:
        code, what = "blocked-port", "one direction is blocked"
        advice = "the other direction works, so a firewall or a route blocks this one"
    else:
        code, what = "dead-link", "there is no connection"
        advice = "check the cables, the routes and the firewall between them"
    if any(way.address.startswith("127.") for way in ways):
        advice = "that address is the host's own: set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
    more = f"; and {len(tries) - 4} more" if len(tries) > 4 else ""
    text = f"{what} between rank {ranks[0]} and {others} ({'; '.join(tries[:4])}{more})"
    return Finding(code, ranks, text, advice, True)


def _ends(way: Unreachable) -> tuple[int, int]:
    return way.source, way.target


def of_facts(facts: Sequence[Facts]) -> list[Finding]:
    """Judge what the ranks say about their machines."""
    found = []
    for field, (code, what, advice, fatal) in _EQUAL.items():
        groups: dict[str, list[int]] = defaultdict(list)
        for rank, each in enumerate(facts):
            groups[str(getattr(each, field))].append(rank)
        if len(groups) > 1:
            # The smaller groups are named: they probably differ from what was meant.
            usual = max(groups.values(), key=len)
            odd = tuple(sorted(set(range(len(facts))) - set(usual)))
            shown = "; ".join(
                f"{value or 'none'} on {ranks_named(ranks)}" for value, ranks in groups.items()
            )
            found.append(Finding(code, odd, f"{what} differ: {shown}", advice, fatal))
    return found + _of_shared_memory(facts)


_VERSIONS = "install the same versions on all nodes"


class _Equal(NamedTuple):
    """The finding about ranks that differ in something that should be equal."""

    code: str
    what: str
    advice: str
    fatal: bool = False


_EQUAL = {
    "backend": _Equal(
        "backends",
        "backends",
        "a rank without a GPU takes gloo: start fewer ranks per node, check the driver, or pass "
        "--backend",
        fatal=True,
    ),
    "torch": _Equal("versions", "versions of torch", _VERSIONS),
    "torchcomp": _Equal("versions", "versions of torchcomp", _VERSIONS),
    "python": _Equal("versions", "versions of Python", _VERSIONS),
    "nccl": _Equal("versions", "versions of NCCL", _VERSIONS),
    "driver": _Equal("versions", "versions of the GPU's driver", _VERSIONS),
    "gpu": _Equal(
        "gpus", "GPUs", "the slowest GPU sets the pace: give it a smaller batch, or leave it"
    ),
    "cores": _Equal(
        "cores", "cores per process", "check taskset, cgroups and Slurm's --cpus-per-task"
    ),
    "threads": _Equal(
        "threads", "threads of torch", "set OMP_NUM_THREADS to one value on all nodes"
    ),
    "kernels": _Equal(
        "kernels",
        "kernels of torchcomp",
        'pip install "torchcomp-ddp[kernels]" on all nodes, or triton on GPUs',
    ),
    "mtu": _Equal("mtu", "MTUs", "set one MTU on all interfaces and switches"),
}


def _of_shared_memory(facts: Sequence[Facts]) -> list[Finding]:
    small = [rank for rank, each in enumerate(facts) if 0 <= each.shm_free < SHM]
    if not small:
        return []
    free = min(facts[rank].shm_free for rank in small)
    text = f"/dev/shm has {size(free)} free on {ranks_named(small)}"
    advice = "data loaders and NCCL need more: docker run --shm-size=8g, or --ipc=host"
    return [Finding("shm", tuple(small), text, advice)]


def of_clocks(clocks: Sequence[Clock]) -> list[Finding]:
    """Judge the clocks of the ranks."""
    skewed = [rank for rank, clock in enumerate(clocks) if abs(clock.offset) - clock.error > SKEW]
    if not skewed:
        return []
    shown = ", ".join(f"rank {rank} by {clocks[rank].offset:+.2f} s" for rank in skewed)
    advice = "run chrony or ntpd on all nodes: logs and traces cannot be compared"
    return [Finding("clock", tuple(skewed), f"clocks differ from rank 0's: {shown}", advice)]


def of_speeds(speeds: Sequence[Speed]) -> list[Finding]:
    """Judge how fast the ranks compute."""
    found = []
    for rank, speed in enumerate(speeds):
        others = [each for other, each in enumerate(speeds) if other != rank]
        # At its best against the others at their worst, so that noise is not found.
        if not others or speed.low < SLOW_RANK * statistics.median(each.high for each in others):
            continue
        factor = speed.median / statistics.median(each.median for each in others)
        text = f"rank {rank} computes {factor:.1f}x slower than the others"
        advice = "it ran all the time: compare its clock rate, temperature and power limit"
        if speed.busy < 0.8:
            advice = (
                f"it got {speed.busy:.0%} of its cores: end other programs there, or raise the "
                "limit of its container"
            )
        found.append(Finding("slow-rank", (rank,), text, advice))
    return found


def of_links(links: Sequence[Link], fastest: float = math.inf) -> list[Finding]:
    """Judge the links, those inside nodes and those between nodes separately.

    Args:
        links: each direction by itself.
        fastest: bytes per second up to which the measurement tells links apart.
    """
    found = [
        Finding(
            "lost-link",
            (link.source, link.target),
            f"the link from rank {link.source} to rank {link.target} failed: {link.error}",
            "it connected before: look for lost packets and for a firewall with a limit",
            fatal=True,
        )
        for link in links
        if link.error
    ]
    for inside in (True, False):
        some = [link for link in links if link.inside == inside and not link.error]
        found += _of_bandwidth(some, fastest) + _of_latency(some)
    return found


def suspects(links: Sequence[Link], fastest: float = math.inf) -> list[tuple[int, int]]:
    """Return the pairs of ranks to measure again, before a finding is made of them."""
    pairs = set()
    for finding in of_links(links, fastest):
        if finding.code == "lost-link":
            continue
        for link in links:
            ends = {link.source, link.target}
            if ends == set(finding.ranks) or (len(finding.ranks) == 1 and finding.ranks[0] in ends):
                pairs.add((min(ends), max(ends)))
    return sorted(pairs)


def _of_bandwidth(links: Sequence[Link], fastest: float) -> list[Finding]:
    found, slow = [], set[int]()
    for way, end in (("from", _source), ("to", _target)):
        best = _best(links, end, lambda link: link.bandwidth, max)
        for rank, value in best.items():
            usual = min(fastest, statistics.median(best.values()))
            if SLOW_LINK * value < usual:
                slow.add(rank)
                text = f"all links {way} rank {rank} are slow: at most {rate(value)}, "
                text += f"where others reach {rate(usual)}"
                advice = "check its network card, cable, switch port and driver"
                found.append(Finding("slow-links", (rank,), text, advice))
    out = _best(links, _source, lambda link: link.bandwidth, max)
    into = _best(links, _target, lambda link: link.bandwidth, max)
    for link in links:
        usual = min(fastest, out[link.source], into[link.target])
        if SLOW_LINK * link.bandwidth < usual:
            text = f"the link from rank {link.source} to rank {link.target} is slow: "
            text += f"{rate(link.bandwidth)}, where both reach {rate(usual)} with others"
            advice = "check the route and the switches between these two"
            found.append(Finding("slow-link", (link.source, link.target), text, advice))
    return found


def _of_latency(links: Sequence[Link]) -> list[Finding]:
    best = _best(links, _source, lambda link: link.latency, min)
    found = []
    for rank, value in best.items():
        usual = statistics.median(best.values())
        if value > LATE_LINK * usual and value > usual + LATE_SECONDS:
            text = f"all links of rank {rank} are late: {duration(value)} one way at best, "
            text += f"where others take {duration(usual)}"
            advice = "check its network card, and whether it is in another place"
            found.append(Finding("late-links", (rank,), text, advice))
    for link in links:
        usual = max(best[link.source], best[link.target])
        if link.latency > LATE_LINK * usual and link.latency > usual + LATE_SECONDS:
            text = f"the link from rank {link.source} to rank {link.target} is late: "
            text += f"{duration(link.latency)}, where both take {duration(usual)} with others"
            advice = "check the route between these two"
            found.append(Finding("late-link", (link.source, link.target), text, advice))
    return found


def _best(
    links: Sequence[Link],
    end: Callable[[Link], int],
    value: Callable[[Link], float],
    best: Callable[..., float],
) -> dict[int, float]:
    """Return the best value of the links at each rank."""
    values: dict[int, list[float]] = defaultdict(list)
    for link in links:
        values[end(link)].append(value(link))
    return {rank: best(each) for rank, each in values.items()}


def _source(link: Link) -> int:
    return link.source


def _target(link: Link) -> int:
    return link.target
