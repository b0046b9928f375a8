"""Findings: what is wrong with a job, judged from what was measured. No measurement is made here.

Machines are noisy, so each bound is a ratio to what the same job reaches elsewhere.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchcomp.advisor.doctor.connections import Unreachable
from torchcomp.advisor.doctor.job import ranks_named
from torchcomp.advisor.doctor.links import Link, Pair
from torchcomp.advisor.doctor.ranks import Clock, Facts, Speed, quartiles
from torchcomp.advisor.units import duration, rate, size

TCP_FASTEST = 2e9
"""Bytes per second above which a core, not the link, sets the pace of a TCP connection."""

_SLOW_LINK = 2.0  # a link is slow if the other links of its two ranks are this many times faster
_LATE_LINK, _LATE_SECONDS = 4.0, 1e-3  # and late if it takes so many times, and seconds, longer
_SLOW_RANK = 1.3  # the best quarter of a slow rank's times, by the worst quarter of the others'
_SKEW = 0.1  # seconds by which clocks may differ
_SHM = 128 * 2**20  # free bytes that /dev/shm should have: data loaders and NCCL use it
_MOST_TRIES = 4  # that a finding about connections shows


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    code: str  # a short name that does not change between versions
    ranks: tuple[int, ...]  # that it is about
    text: str  # what is wrong, with ranks and numbers
    advice: str  # what to do
    fatal: bool = False  # whether the job cannot train like this


def of_connections(failed: Sequence[Unreachable]) -> list[Finding]:
    """Judge connections that failed: a finding per pair of ranks, or one for their common rank."""
    pairs: dict[Pair, list[Unreachable]] = defaultdict(list)
    for each in failed:
        pairs[min(each.source, each.target), max(each.source, each.target)].append(each)
    shared = set.intersection(*map(set, pairs)) if len(pairs) > 1 else set[int]()
    if shared:
        return [_unreachable(tuple(shared), "the other ranks", failed)]
    return [_unreachable(pair, f"rank {pair[1]}", ways) for pair, ways in sorted(pairs.items())]


def _unreachable(ranks: tuple[int, ...], others: str, ways: Sequence[Unreachable]) -> Finding:
    ends = {(way.source, way.target) for way in ways}
    if any(way.host_answers for way in ways):
        code, what = "blocked-port", "a port is blocked"
        advice = "the host answers, so a firewall blocks ports: open all TCP ports between nodes"
    elif not any((target, source) in ends for source, target in ends):
        code, what = "blocked-port", "one direction is blocked"
        advice = "the other direction works, so a firewall or a route blocks this one"
    else:
        code, what = "dead-link", "there is no connection"
        advice = "check the cables, the routes and the firewall between them"
    if any(way.address.startswith("127.") for way in ways):
        advice = "that address is the host's own: set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
    tries = [f"rank {w.source} to rank {w.target} at {w.address}: {w.reason}" for w in ways]
    if len(tries) > _MOST_TRIES:
        tries[_MOST_TRIES:] = [f"and {len(tries) - _MOST_TRIES} more"]
    text = f"{what} between rank {ranks[0]} and {others} ({'; '.join(tries)})"
    return Finding(code, ranks, text, advice, fatal=True)


_VERSIONS = "install the same versions on all nodes"
# What should be equal on all ranks, by the name in Facts: code, words and advice.
_EQUAL = {
    "backend": (
        "backends",
        "backends",
        "a rank without a GPU takes gloo: start fewer ranks per node, check the driver, or pass "
        "--backend",
    ),
    "torch": ("versions", "versions of torch", _VERSIONS),
    "torchcomp": ("versions", "versions of torchcomp", _VERSIONS),
    "python": ("versions", "versions of Python", _VERSIONS),
    "nccl": ("versions", "versions of NCCL", _VERSIONS),
    "driver": ("versions", "versions of the GPU's driver", _VERSIONS),
    "gpu": ("gpus", "GPUs", "the slowest GPU sets the pace: give it a smaller batch, or leave it"),
    "cores": ("cores", "cores per process", "check taskset, cgroups and Slurm's --cpus-per-task"),
    "threads": ("threads", "threads of torch", "set OMP_NUM_THREADS to one value on all nodes"),
    "kernels": (
        "kernels",
        "kernels of torchcomp",
        'pip install "torchcomp-ddp[kernels]" on all nodes, or triton on GPUs',
    ),
    "mtu": ("mtu", "MTUs", "set one MTU on all interfaces and switches"),
}


def of_facts(facts: Sequence[Facts]) -> list[Finding]:
    """Judge what the ranks say about their machines."""
    found = []
    for field, (code, what, advice) in _EQUAL.items():
        groups: dict[str, list[int]] = defaultdict(list)
        for rank, each in enumerate(facts):
            groups[str(getattr(each, field))].append(rank)
        if len(groups) > 1:
            # The smaller groups are named: they probably differ from what was meant.
            usual = max(groups.values(), key=len)
            odd = tuple(rank for rank in range(len(facts)) if rank not in usual)
            shown = [f"{value or 'none'} on {ranks_named(of)}" for value, of in groups.items()]
            text = f"{what} differ: {'; '.join(shown)}"
            found.append(Finding(code, odd, text, advice, fatal=field == "backend"))
    small = tuple(rank for rank, each in enumerate(facts) if 0 <= each.shm_free < _SHM)
    if small:
        free = min(facts[rank].shm_free for rank in small)
        text = f"/dev/shm has {size(free)} free on {ranks_named(small)}"
        advice = "data loaders and NCCL need more: docker run --shm-size=8g, or --ipc=host"
        found.append(Finding("shm", small, text, advice))
    return found


def of_clocks(clocks: Sequence[Clock]) -> list[Finding]:
    """Judge the clocks of the ranks."""
    skewed = [rank for rank, clock in enumerate(clocks) if abs(clock.offset) - clock.error > _SKEW]
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
        if not others:
            continue
        # At its best against the others at their worst, so that noise is not found.
        worst = statistics.median(quartiles(each.seconds)[1] for each in others)
        if quartiles(speed.seconds)[0] < _SLOW_RANK * worst:
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
    """Judge the links; up to `fastest` bytes per second, the measurement tells them apart."""
    advice = "it connected before: look for lost packets and for a firewall with a limit"
    found = [
        Finding("lost-link", _ends(link), f"{_named(link)} failed: {link.error}", advice, True)
        for link in links
        if link.error
    ]
    for inside in (True, False):
        some = [link for link in links if link.inside == inside and not link.error]
        found += _of_bandwidth(some, fastest) + _of_latency(some)
    return found


def suspects(links: Sequence[Link], fastest: float = math.inf) -> list[Pair]:
    """Return the pairs of ranks to measure again, before a finding is made of them."""
    named = [each.ranks for each in of_links(links, fastest) if each.code != "lost-link"]
    pairs = {(min(_ends(link)), max(_ends(link))) for link in links}
    return sorted(pair for pair in pairs if any({*ranks} <= {*pair} for ranks in named))


def _of_bandwidth(links: Sequence[Link], fastest: float) -> list[Finding]:
    found = []
    out, into = (_best(links, end, lambda link: link.bandwidth, max) for end in (0, 1))
    for way, best in (("from", out), ("to", into)):
        usual = min(fastest, statistics.median(best.values() or [0.0]))
        for rank, value in best.items():
            if _SLOW_LINK * value < usual:
                text = f"all links {way} rank {rank} are slow: at most {rate(value)}, "
                text += f"where others reach {rate(usual)}"
                advice = "check its network card, cable, switch port and driver"
                found.append(Finding("slow-links", (rank,), text, advice))
    for link in links:
        usual = min(fastest, out[link.source], into[link.target])
        if _SLOW_LINK * link.bandwidth < usual:
            text = f"{_named(link)} is slow: {rate(link.bandwidth)}, "
            text += f"where both reach {rate(usual)} with others"
            advice = "check the route and the switches between these two"
            found.append(Finding("slow-link", _ends(link), text, advice))
    return found


def _of_latency(links: Sequence[Link]) -> list[Finding]:
    def is_late(value: float, usual: float) -> bool:
        return value > _LATE_LINK * usual and value > usual + _LATE_SECONDS

    best = _best(links, 0, lambda link: link.latency, min)
    found = []
    for rank, value in best.items():
        usual = statistics.median(best.values())
        if is_late(value, usual):
            text = f"all links of rank {rank} are late: {duration(value)} one way at best, "
            text += f"where others take {duration(usual)}"
            advice = "check its network card, and whether it is in another place"
            found.append(Finding("late-links", (rank,), text, advice))
    for link in links:
        usual = max(best[link.source], best[link.target])
        if is_late(link.latency, usual):
            text = f"{_named(link)} is late: {duration(link.latency)}, "
            text += f"where both take {duration(usual)} with others"
            found.append(
                Finding("late-link", _ends(link), text, "check the route between these two")
            )
    return found


def _best(
    links: Sequence[Link], end: int, value: Callable[[Link], float], best: Callable[..., float]
) -> dict[int, float]:
    """Return the best value of the links at each rank, at their first or second end."""
    values: dict[int, list[float]] = defaultdict(list)
    for link in links:
        values[_ends(link)[end]].append(value(link))
    return {rank: best(each) for rank, each in values.items()}


def _ends(link: Link) -> Pair:
    return link.source, link.target


def _named(link: Link) -> str:
    return f"the link from rank {link.source} to rank {link.target}"
