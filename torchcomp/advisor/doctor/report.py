"""Report: the results as text of at most 80 columns, and as JSON."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torchcomp.advisor.collectives import CollectiveTimes
from torchcomp.advisor.doctor.findings import Finding, Row, Verdict
from torchcomp.advisor.doctor.job import ranks_named
from torchcomp.advisor.doctor.measures import ALL_PAIRS, Clock, Facts, Link, Speed
from torchcomp.advisor.doctor.training import PLAIN
from torchcomp.advisor.units import duration, rate, size, wrapped
from torchcomp.specs.version import __version__

SCHEMA = 2  # version of the JSON: it grows when a name goes away or changes its meaning
HEALTHY, FOUND, NOT_MEASURED = 0, 1, 3  # exit statuses; 2 is bad options
_SHOWN_SIZES = (2**12, 2**18, 2**22, 2**24)
_MOST_SHOWN = 20
_PREDICTED = """predicted: nothing was trained with it. docs/prediction.md has the error, and \
docs/performance.md the effect on the accuracy"""


@dataclass
class Results:
    """What was measured, as far as it got. All ranks have the same, unless there is an error."""

    backend: str = ""  # "gloo" or "nccl"
    facts: list[Facts] = field(default_factory=list)  # of every rank, as are clocks and speeds
    findings: list[Finding] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)  # over TCP, each direction separately
    speeds: list[Speed] = field(default_factory=list)
    collectives: CollectiveTimes | None = None  # None for one rank
    rows: list[Row] = field(default_factory=list)  # step times, in the order of MODES
    verdict: Verdict | None = None  # None without a workload, or for one rank
    workload: str = ""  # what trained
    seconds: float = 0.0  # how long all took
    error: str = ""  # why the rest was not measured

    @property
    def fatal(self) -> bool:
        """Whether the ranks cannot train together."""
        return any(finding.fatal for finding in self.findings)

    @property
    def world_size(self) -> int:
        return len(self.facts)


def status(results: Results) -> int:
    """Return the exit status."""
    if results.error or results.fatal:
        return NOT_MEASURED
    return FOUND if results.findings else HEALTHY


def as_dict(results: Results) -> dict[str, Any]:
    """Return everything as plain values for JSON, in seconds and bytes."""
    plain = asdict(results)
    plain["collectives"] = results.collectives and results.collectives.to_dict()
    for link, row in zip(results.links, plain["links"], strict=True):
        row |= {"bandwidth": link.bandwidth, "latency": link.latency}
    return {"schema": SCHEMA, "torchcomp": __version__, "status": status(results), **plain}


def text(results: Results) -> str:
    """Return the report."""
    sections = (
        _machines(results),
        _links(results.links, results.world_size),
        _ranks(results),
        _collectives(results),
        _steps(results),
        _findings(results),
        [wrapped("", f"verdict: {_verdict(results)}")],
    )
    ranks, nodes = results.world_size, len({each.node for each in results.facts})
    where = f"{_counted(ranks, 'rank')} on {_counted(nodes, 'node')}, {results.backend}"
    head = f"torchcomp doctor: {where}, {results.seconds:.0f} s"
    return "\n\n".join([head, *filter(None, map("\n".join, sections))])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def _machines(results: Results) -> Iterator[str]:
    groups: dict[str, list[int]] = {}
    for rank, facts in enumerate(results.facts):
        shm = f"/dev/shm {size(facts.shm_free)} free" if facts.shm_bytes >= 0 else "no /dev/shm"
        cores, threads = _counted(facts.cores, "core"), _counted(facts.threads, "thread")
        parts = [f"host {facts.host}", cores, threads, facts.gpu, shm, f"{facts.kernels} kernels"]
        parts += [f"interface {facts.interface or 'unknown'}", f"torch {facts.torch}"]
        parts += [f"torchcomp {facts.torchcomp}", f"Python {facts.python}"]
        parts += [facts.nccl and f"NCCL {facts.nccl}", facts.driver and f"driver {facts.driver}"]
        groups.setdefault(", ".join(filter(None, parts)), []).append(rank)
    yield "machines"
    for described, ranks in list(groups.items())[:_MOST_SHOWN]:
        yield wrapped(f"  {ranks_named(ranks)}: ", described)


def _links(links: Sequence[Link], world_size: int) -> Iterator[str]:
    if not links:
        return
    yield f"links over TCP{'' if world_size <= ALL_PAIRS else ', a ring and a sample'}"
    yield _cells(f"  {'':<14}links", ("slowest", "median", "latency", "worst latency"), 14)
    for title, inside in (("inside nodes", True), ("between nodes", False)):
        some = [link for link in links if link.inside == inside and not link.error]
        if not some:
            continue
        slow = min(some, key=lambda link: link.bandwidth)
        late = max(some, key=lambda link: link.latency)
        rates = [slow.bandwidth, statistics.median(link.bandwidth for link in some)]
        delays = [statistics.median(link.latency for link in some), late.latency]
        cells = [*map(rate, rates), *map(duration, delays)]
        yield _cells(f"  {title:<14}{len(some):>5}", cells, 14)
        ends = f"slowest: rank {slow.source} to rank {slow.target}; largest latency: rank "
        yield wrapped("    ", f"{ends}{late.source} to rank {late.target}")


def _cells(head: str, cells: Sequence[str], width: int) -> str:
    return head + "".join(f"{cell:>{width}}" for cell in cells)


def _ranks(results: Results) -> Iterator[str]:
    if results.speeds:
        rank, speed = max(enumerate(results.speeds), key=lambda each: each[1].median)
        factor = speed.median / statistics.median(each.median for each in results.speeds)
        yield "computing at the same time"
        text = f"slowest: rank {rank}, {factor:.2f}x the median rank's time; it had a core for "
        yield wrapped("  ", f"{text}{speed.busy:.0%} of the time")


def _collectives(results: Results) -> Iterator[str]:
    if results.collectives is None:
        return
    points = {
        kind: {point.nbytes: duration(point.seconds) for point in row}
        for kind, row in results.collectives.points.items()
    }
    sizes = [each for each in _SHOWN_SIZES if any(each in row for row in points.values())]
    yield _cells("collectives   ", [*map(size, sizes)], 12)
    for kind, row in points.items():
        cells = _cells("", [row.get(each, "-") for each in sizes], 12)
        yield f"  {kind:<16}{cells[4:]}"


def _steps(results: Results) -> Iterator[str]:
    if not results.rows:
        return
    yield wrapped("", f"training step: {results.workload}")
    rows = results.verdict.rows if results.verdict else results.rows
    plain = next((row.seconds for row in rows if row.method == PLAIN), 0.0)
    yield _cells(f"  {'':<36}steps", ("step", "from", "to"), 9) + f"{'speed':>8}"
    for row in rows:
        faster = f"{plain / row.seconds:.2f}x" if results.verdict else ""
        numbers = _cells("", [*map(duration, (row.seconds, row.low, row.high))], 9)
        name = row.method if row.steps else f"{row.method}, predicted"
        # A long spec gets a line of its own.
        if len(name) > 35:
            yield f"  {name}"
            name = ""
        yield f"  {name:<36}{row.steps or '-':>5}{numbers}{faster:>8}".rstrip()
        if row.caveat:
            yield wrapped("    ", row.caveat)
    if any(not row.steps for row in rows):
        yield wrapped("  ", _PREDICTED)


def _findings(results: Results) -> Iterator[str]:
    yield f"findings: {len(results.findings) or 'none'}"
    for number, finding in enumerate(results.findings[:_MOST_SHOWN], 1):
        advice = finding.advice[0].upper() + finding.advice[1:]
        yield wrapped(f"  {number}. ", f"[{finding.code}] {finding.text}. {advice}.")
    more = len(results.findings) - _MOST_SHOWN
    if more > 0:
        yield f"  and {more} more, in --json"


def _verdict(results: Results) -> str:
    if results.error:
        return f"none, because {results.error}"
    if results.fatal:
        return "the ranks cannot train together, see the findings"
    if results.verdict is not None:
        share = f"{results.verdict.waiting:.0%} of the step waits for gradients"
        return f"{results.verdict.bound}: {share}. {results.verdict.advice}"
    if results.world_size == 1:
        return "one rank exchanges nothing; start more with torchrun"
    return "none without a training step: add --model, --numel or --script"
