"""Findings and verdict: what is wrong with a job, and whether it waits for the network.

Machines are noisy, so each bound is a ratio to what the same job reaches elsewhere.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchcomp.advisor.collectives import Times
from torchcomp.advisor.doctor.job import Job, Unreachable, ranks_named
from torchcomp.advisor.doctor.measures import Clock, Facts, Link, Pair, Speed, quartiles
from torchcomp.advisor.doctor.training import NO_EXCHANGE, PLAIN
from torchcomp.advisor.prediction import BF16, DDP, USUAL, Prediction, Run
from torchcomp.advisor.recording import MOST_ELEMENTS, random_values
from torchcomp.advisor.units import duration, rate, size

# Bytes per second above which a core, not the link, sets the pace of a TCP connection.
_FASTEST = 2e9
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


_NO_GPU = "a rank without a GPU takes gloo: start fewer ranks per node, check the driver, or pass "
_NO_GPU += "--backend"
_VERSIONS = "install the same versions on all nodes"
_EXTRA = 'pip install "torchcomp-ddp[kernels]" on all nodes, or triton on GPUs'
# What should be equal on all ranks, by the name in Facts: code, words and advice.
_EQUAL = {
    "backend": ("backends", "backends", _NO_GPU),
    "torch": ("versions", "versions of torch", _VERSIONS),
    "torchcomp": ("versions", "versions of torchcomp", _VERSIONS),
    "python": ("versions", "versions of Python", _VERSIONS),
    "nccl": ("versions", "versions of NCCL", _VERSIONS),
    "driver": ("versions", "versions of the GPU's driver", _VERSIONS),
    "gpu": ("gpus", "GPUs", "the slowest GPU sets the pace: give it a smaller batch, or leave it"),
    "cores": ("cores", "cores per process", "check taskset, cgroups and Slurm's --cpus-per-task"),
    "threads": ("threads", "threads of torch", "set OMP_NUM_THREADS to one value on all nodes"),
    "kernels": ("kernels", "kernels of torchcomp", _EXTRA),
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
            advice = f"it got {speed.busy:.0%} of its cores: end other programs there, or raise "
            advice += "the limit of its container"
        found.append(Finding("slow-rank", (rank,), text, advice))
    return found


def of_links(links: Sequence[Link]) -> list[Finding]:
    """Judge the links."""
    advice = "it connected before: look for lost packets and for a firewall with a limit"
    found = [
        Finding("lost-link", _ends(link), f"{_named(link)} failed: {link.error}", advice, True)
        for link in links
        if link.error
    ]
    for inside in (True, False):
        some = [link for link in links if link.inside == inside and not link.error]
        found += _compared("slow", some) + _compared("late", some)
    return found


def suspects(links: Sequence[Link]) -> list[Pair]:
    """Return the pairs of ranks to measure again, before a finding is made of them."""
    named = [each.ranks for each in of_links(links) if each.code != "lost-link"]
    pairs = {(min(_ends(link)), max(_ends(link))) for link in links}
    return sorted(pair for pair in pairs if any({*ranks} <= {*pair} for ranks in named))


def _is_slow(bandwidth: float, usual: float) -> bool:
    return _SLOW_LINK * bandwidth < min(_FASTEST, usual)


def _is_late(latency: float, usual: float) -> bool:
    return latency > _LATE_LINK * usual and latency > usual + _LATE_SECONDS


_JUDGED: Mapping[str, tuple[Any, Any, Any, Any]] = {
    "slow": (max, min, _is_slow, rate),
    "late": (min, max, _is_late, duration),
}


def _compared(how: str, links: Sequence[Link]) -> list[Finding]:
    """Name the links that are slow, or late, compared with the other ones of their ranks."""
    best, worst, is_bad, shown = _JUDGED[how]
    slow = how == "slow"
    values = {_ends(link): link.bandwidth if slow else link.latency for link in links}
    out, into = _best(values, 0, best), _best(values, 1, best)
    # A round trip has both directions.
    ways = {"from": out, "to": into} if slow else {"of": out}
    found = []
    for way, of_ranks in ways.items():
        usual = statistics.median(of_ranks.values() or [0.0])
        for rank, value in of_ranks.items():
            if is_bad(value, usual):
                text = f"all links {way} rank {rank} are {how}: {shown(value)} at best, "
                text += f"where others reach {shown(usual)}"
                advice = "check its network card, cable, switch port and driver, and where it is"
                found.append(Finding(f"{how}-links", (rank,), text, advice))
    for link in links:
        value, usual = values[_ends(link)], worst(out[link.source], into[link.target])
        if is_bad(value, usual):
            text = f"{_named(link)} is {how}: {shown(value)}, "
            text += f"where both reach {shown(usual)} with others"
            advice = "check the route and the switches between these two"
            found.append(Finding(f"{how}-link", _ends(link), text, advice))
    return found


def _best(values: Mapping[Pair, float], end: int, best: Any) -> dict[int, float]:
    """Return the best value of the links at each rank, at their first or second end."""
    by_rank: dict[int, list[float]] = defaultdict(list)
    for ends, value in values.items():
        by_rank[ends[end]].append(value)
    return {rank: best(each) for rank, each in by_rank.items()}


def _ends(link: Link) -> Pair:
    return link.source, link.target


def _named(link: Link) -> str:
    return f"the link from rank {link.source} to rank {link.target}"


# Shares of a step that wait for gradients: below the first nothing can be won, below the second
# little.
_NOTHING, _LITTLE = 0.10, 0.25
ERROR = 0.25  # more than nine in ten predictions are closer: see docs/prediction.md
_STEPS = 1000  # of the run whose mean step is predicted
_LOCAL = "local steps: each rank trains alone between two averages, see docs/methods/local-sgd.md"
_FEW, _VARIATION = 3, 0.2
_WORTH = 0.95  # of the step of plain DDP: a method that takes more is not worth it


@dataclass(frozen=True)
class Row:
    """The step time of one method."""

    method: str  # its spec or name
    seconds: float  # of a step, from `low` to `high`:
    low: float  # quartiles if measured, the error of the model if predicted
    high: float
    steps: int  # how many were measured; 0 if it is predicted
    caveat: str = ""  # what else to know
    local: bool = False  # whether these are local steps, which train in another way

    @property
    def interval(self) -> tuple[float, float]:
        """Between what the step may take: a few steps do not show how they vary."""
        if 0 < self.steps < _FEW:
            return self.seconds * (1 - _VARIATION), self.seconds * (1 + _VARIATION)
        return self.low, self.high


@dataclass(frozen=True)
class Verdict:
    """What the steps show."""

    bound: str  # "network-bound", "partly network-bound", "compute-bound" or "unclear"
    waiting: float  # share of a step of plain DDP that waits for gradients
    rows: tuple[Row, ...]  # the methods, measured ones first
    advice: str  # what to do, as a sentence


def measured_rows(ranks: Sequence[Mapping[str, Sequence[float]]]) -> list[Row]:
    """Return a row for each mode, from the seconds of the rank that was slowest."""
    rows = []
    for mode in ranks[0]:
        slowest = max((times[mode] for times in ranks), key=statistics.median)
        rows.append(Row(mode, statistics.median(slowest), *quartiles(slowest), len(slowest)))
    return rows


def predicted_rows(
    job: Job,
    parameters: Mapping[str, Tensor],
    alone: float,
    collectives: Times,
    cores: float,
    budget: float,
) -> list[Row]:
    """Predict the step times of further methods, as far as there is time. All ranks call this.

    Each records a method on gradients of the model's size, and simulates a step with what was
    measured: `alone`, the seconds of a step without any exchange, and the collectives.
    """
    if sum(each.numel() for each in parameters.values()) > MOST_ELEMENTS:
        return []
    began = time.monotonic()
    values = random_values(parameters, job.device)
    # Where ranks share cores, a step needs less of a core than its time on the clock.
    run = Run(job.world_size, _STEPS, alone * min(1.0, cores))
    rows = []
    for spec in USUAL:
        if spec in (DDP, BF16):  # these are measured
            continue
        prediction = Prediction(spec, values, run)
        seconds = prediction.step(collectives, cores=cores).seconds
        passed = time.monotonic() - began
        ranks = job.gather(f"prediction of {spec}", [seconds, passed], job.patience + budget)
        seconds, passed = map(max, zip(*ranks, strict=True))
        low, high = seconds * (1 - ERROR), seconds * (1 + ERROR)
        caveat = _LOCAL if prediction.local else ""
        rows.append(Row(spec, seconds, low, high, 0, caveat, prediction.local))
        if passed > budget:
            break
    return rows


def judge(measured: Sequence[Row], predicted: Sequence[Row] = ()) -> Verdict:
    """Return the verdict on measured steps, of all :data:`.MODES`, and on predicted ones."""
    by_name = {row.method: row for row in measured}
    ddp, floor = by_name[PLAIN].seconds, by_name[NO_EXCHANGE].seconds
    waiting = max(0.0, 1 - floor / ddp)
    rows = (*measured, *sorted(predicted, key=lambda row: row.seconds))
    if waiting < _NOTHING:
        return Verdict("compute-bound", waiting, rows, "Nothing to win: keep plain DDP.")
    overlap = by_name[NO_EXCHANGE].interval[1] > by_name[PLAIN].interval[0]
    # Nothing is faster than no exchange.
    if overlap or min(row.seconds for row in measured) < (1 - _NOTHING) * floor:
        advice = "The steps vary too much to say: end other programs, or raise --seconds."
        return Verdict("unclear", waiting, rows, advice)
    advice = f"Without any exchange it would be {ddp / floor:.1f}x faster."
    advice += f" {_faster(rows, ddp) or 'No method is faster than plain DDP.'}"
    if not predicted and waiting >= _LITTLE:
        advice += " Try the methods of docs/choosing.md, which send less."
    bound = "network-bound" if waiting >= _LITTLE else "partly network-bound"
    return Verdict(bound, waiting, rows, advice)


def _faster(rows: Sequence[Row], ddp: float) -> str:
    """Name the fastest method of each kind: measured, predicted, and local steps."""
    others = [row for row in rows if row.method not in (PLAIN, NO_EXCHANGE)]
    found = []
    for steps, local in ((True, False), (False, False), (False, True)):
        kind = [row for row in others if bool(row.steps) == steps and row.local == local]
        best = min(kind, key=lambda row: row.seconds, default=None)
        if best is not None and best.seconds <= _WORTH * ddp:
            how = "" if steps else " (predicted)"
            found.append(f"{best.method} is {ddp / best.seconds:.1f}x faster{how}")
    return "; ".join(found) + "." if found else ""
