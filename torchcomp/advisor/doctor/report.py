"""Report: the results as text of at most 80 columns, and as JSON."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from torchcomp._version import __version__
from torchcomp.advisor.doctor.examination import Results
from torchcomp.advisor.doctor.facts import Facts
from torchcomp.advisor.doctor.findings import Finding
from torchcomp.advisor.doctor.job import ranks_named
from torchcomp.advisor.doctor.links import Link
from torchcomp.advisor.doctor.rounds import ALL_PAIRS
from torchcomp.advisor.doctor.verdict import speedup
from torchcomp.advisor.units import duration, rate, size
from torchcomp.plan import wrapped

SCHEMA = 1
"""Version of the JSON. It grows when a name goes away or changes its meaning."""

HEALTHY, FOUND, NOT_MEASURED = 0, 1, 3
"""Exit statuses. 2 is bad options."""

_SHOWN_SIZES = (2**12, 2**18, 2**22, 2**24)
_MOST_SHOWN = 20

_PREDICTED = (
    "predicted: nothing was trained with it. docs/prediction.md has the error, and "
    "docs/performance.md the effect on the accuracy"
)


def status(results: Results) -> int:
    """Return the exit status."""
    if results.error or results.fatal:
        return NOT_MEASURED
    return FOUND if results.findings else HEALTHY


def text(results: Results) -> str:
    """Return the report."""
    sections: list[Iterable[str]] = [_head(results), _machines(results)]
    for name, links in (("TCP", results.links), ("NCCL", results.nccl_links)):
        if links:
            sections.append(_links(name, links, results.world_size))
    sections += [_ranks(results), _collectives(results), _steps(results), _findings(results)]
    sections.append(_verdict(results))
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def as_dict(results: Results) -> dict[str, Any]:
    """Return everything as plain values for JSON, in seconds and bytes."""
    collectives = results.collectives
    values = {**vars(results), "collectives": collectives and collectives.to_dict()}
    plain = {
        name: [asdict(each) for each in value] if isinstance(value, list) else value
        for name, value in values.items()
    }
    if results.verdict is not None:
        plain["verdict"] = asdict(results.verdict)
    for clock in plain["clocks"]:
        clock["offset"] = None if math.isnan(clock["offset"]) else clock["offset"]
    for link, row in zip(results.links, plain["links"], strict=True):
        row |= {"bandwidth": link.bandwidth, "latency": link.latency}
    return {"schema": SCHEMA, "torchcomp": __version__, "status": status(results), **plain}


def _head(results: Results) -> list[str]:
    nodes = len(set(results.nodes))
    ranks = f"{results.world_size} rank{'s' if results.world_size > 1 else ''}"
    where = f"{nodes} node{'s' if nodes > 1 else ''}"
    took = f"{results.seconds:.0f} s"
    return [f"torchcomp doctor: {ranks} on {where}, {results.backend}, {took}"]


def _machines(results: Results) -> list[str]:
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, facts in enumerate(results.facts):
        groups.setdefault(_described(facts), []).append(rank)
    lines = ["machines"]
    for described, ranks in list(groups.items())[:_MOST_SHOWN]:
        lines.append(wrapped(f"  {ranks_named(ranks)}: ", ", ".join(described)))
    return lines


def _described(facts: Facts) -> tuple[str, ...]:
    parts = [
        f"host {facts.host}",
        f"{facts.cores} core{'s' if facts.cores > 1 else ''}",
        f"{facts.threads} thread{'s' if facts.threads > 1 else ''}",
        facts.gpu,
        f"/dev/shm {size(facts.shm_free)} free" if facts.shm_bytes >= 0 else "no /dev/shm",
        f"{facts.kernels} kernels",
        f"interface {facts.interface or 'unknown'}",
        f"torch {facts.torch}",
        f"torchcomp {facts.torchcomp}",
        f"Python {facts.python}",
        facts.nccl and f"NCCL {facts.nccl}",
        facts.driver and f"driver {facts.driver}",
    ]
    return tuple(part for part in parts if part)


def _links(name: str, links: Sequence[Link], world_size: int) -> Iterator[str]:
    sampled = "" if world_size <= ALL_PAIRS else ", a ring and a sample"
    yield f"links over {name}{sampled}"
    heads = ("slowest", "median", "latency", "worst latency")
    yield f"  {'':<14}links" + "".join(f"{head:>14}" for head in heads)
    for title, inside in (("inside nodes", True), ("between nodes", False)):
        some = [link for link in links if link.inside == inside and not link.error]
        if not some:
            continue
        rates = sorted(link.bandwidth for link in some)
        delays = sorted(link.latency for link in some)
        cells = [rate(rates[0]), rate(statistics.median(rates))]
        cells += [duration(statistics.median(delays)), duration(delays[-1])]
        yield f"  {title:<14}{len(some):>5}" + "".join(f"{cell:>14}" for cell in cells)
        slowest = min(some, key=lambda link: link.bandwidth)
        latest = max(some, key=lambda link: link.latency)
        yield wrapped(
            "    ",
            f"slowest: rank {slowest.source} to rank {slowest.target}; largest latency: rank "
            f"{latest.source} to rank {latest.target}",
        )
        yield from _by_size(some)


def _by_size(links: Sequence[Link]) -> Iterator[str]:
    """A line with the median bandwidth of some sizes."""
    by_size: dict[int, list[float]] = {}
    for link in links:
        for nbytes, seconds in link.points:
            by_size.setdefault(nbytes, []).append(nbytes / seconds)
    shown = [
        f"{size(nbytes)} {rate(statistics.median(rates))}"
        for nbytes, rates in by_size.items()
        if nbytes in _SHOWN_SIZES and len(rates) == len(links)
    ]
    yield wrapped("    ", f"by size, with the answer: {', '.join(shown)}")


def _ranks(results: Results) -> Iterator[str]:
    if not results.speeds:
        return
    times = [speed.median for speed in results.speeds]
    slowest = max(range(len(times)), key=times.__getitem__)
    factor = times[slowest] / statistics.median(times)
    busy = f"it had a core for {results.speeds[slowest].busy:.0%} of the time"
    yield "computing at the same time"
    yield wrapped("  ", f"slowest: rank {slowest}, {factor:.2f}x the median rank's time; {busy}")


def _collectives(results: Results) -> Iterator[str]:
    times = results.collectives
    if times is None:
        return
    points = {kind: {point.nbytes: point for point in row} for kind, row in times.points.items()}
    sizes = [each for each in _SHOWN_SIZES if any(each in row for row in points.values())]
    yield "collectives   " + "".join(f"{size(each):>12}" for each in sizes)
    for kind, row in points.items():
        cells = [duration(row[each].seconds) if each in row else "-" for each in sizes]
        yield f"  {kind:<16}" + "".join(f"{cell:>12}" for cell in cells)[4:]


def _steps(results: Results) -> Iterator[str]:
    if not results.rows:
        return
    yield wrapped("", f"training step: {results.workload}")
    rows = results.verdict.rows if results.verdict else results.rows
    heads = ("step", "from", "to")
    yield f"  {'':<36}{'steps':>5}" + "".join(f"{head:>9}" for head in heads) + f"{'speed':>8}"
    for row in rows:
        faster = f"{speedup(row, rows):.2f}x" if results.verdict else ""
        numbers = "".join(f"{duration(each):>9}" for each in (row.seconds, row.low, row.high))
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
    if not results.findings:
        yield "findings: none"
        return
    yield f"findings: {len(results.findings)}"
    for number, finding in enumerate(results.findings[:_MOST_SHOWN], 1):
        yield wrapped(f"  {number}. ", _sentence(finding))
    more = len(results.findings) - _MOST_SHOWN
    if more > 0:
        yield f"  and {more} more, in --json"


def _sentence(finding: Finding) -> str:
    advice = finding.advice[0].upper() + finding.advice[1:]
    return f"[{finding.code}] {finding.text}. {advice}."


def _verdict(results: Results) -> Iterator[str]:
    verdict = results.verdict
    if results.error:
        yield wrapped("", f"verdict: none, because {results.error}")
    elif results.fatal:
        yield wrapped("", "verdict: the ranks cannot train together, see the findings")
    elif verdict is not None:
        share = f"{verdict.waiting:.0%} of the step waits for gradients"
        yield wrapped("", f"verdict: {verdict.bound}: {share}. {verdict.advice}")
    elif results.world_size == 1:
        yield wrapped("", "verdict: one rank exchanges nothing; start more with torchrun")
    else:
        yield wrapped("", "verdict: none without a training step: add --model, --numel or --script")
