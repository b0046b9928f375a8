"""Examination: measure everything, in an order in which nothing hangs.

1. Facts and connections, through the store of the job. A pair that cannot connect ends it.
2. Clocks and links, over these connections.
3. Collectives, computing and training, in a process group.
"""

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from torchcomp.advisor import CollectiveTimes, measure_collectives
from torchcomp.advisor.doctor import findings
from torchcomp.advisor.doctor.channels import Channel, GroupChannel, SocketChannel
from torchcomp.advisor.doctor.clocks import Clock, measure_clocks
from torchcomp.advisor.doctor.facts import Facts, own_facts
from torchcomp.advisor.doctor.findings import Finding
from torchcomp.advisor.doctor.job import Job
from torchcomp.advisor.doctor.links import Link, measure_rounds
from torchcomp.advisor.doctor.phases import MODES, NO_EXCHANGE, Phases, StepTimes
from torchcomp.advisor.doctor.prediction import predicted_rows
from torchcomp.advisor.doctor.preflight import Connections
from torchcomp.advisor.doctor.rounds import chosen_pairs, rounds
from torchcomp.advisor.doctor.speed import Speed, measure_speed
from torchcomp.advisor.doctor.verdict import Row, Verdict, judge, measured_rows
from torchcomp.advisor.doctor.workloads import run_script, train_named, train_synthetic
from torchcomp.exchange import ProcessGroupExchange

_MOST_AGAIN = 24  # pairs that are measured a second and a third time


@dataclass
class Results:
    """What was measured, as far as it got. All ranks have the same, unless there is an error.

    Attributes:
        backend: "gloo" or "nccl".
        facts: of every rank.
        findings: what is wrong.
        clocks: of every rank.
        links: over TCP, each direction by itself.
        nccl_links: the same over NCCL.
        speeds: of every rank.
        collectives: their times; None for one rank.
        rows: step times, in the order of :data:`.MODES`.
        verdict: on the steps; None without a workload, or for one rank.
        workload: what trained, or "".
        seconds: how long all took.
        error: why the rest was not measured, or "".
    """

    backend: str = ""
    facts: list[Facts] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    nccl_links: list[Link] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    collectives: CollectiveTimes | None = None
    rows: list[Row] = field(default_factory=list)
    verdict: Verdict | None = None
    workload: str = ""
    seconds: float = 0.0
    error: str = ""

    @property
    def fatal(self) -> bool:
        """Whether the ranks cannot train together."""
        return any(finding.fatal for finding in self.findings)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.facts)

    @property
    def nodes(self) -> list[int]:
        """The node of every rank."""
        return [each.node for each in self.facts]


def measure(job: Job, options: argparse.Namespace, results: Results) -> None:
    """Measure a job as its options say.

    Args:
        job: this rank.
        options: of the command line.
        results: gets what is measured, step by step.

    Raises:
        NotMeasured: if a rank is missing or a script fails.
    """
    began = time.monotonic()
    try:
        _measure(job, options, results)
    finally:
        results.seconds = time.monotonic() - began


def _measure(job: Job, options: argparse.Namespace, results: Results) -> None:
    say = _reporter(job)
    say("connecting every pair of ranks")
    connections = Connections(job)
    try:
        rows = job.gather("facts", vars(own_facts(job, connections.address)))
        results.facts = [Facts(**row) for row in rows]
        results.findings += findings.of_facts(results.facts)
        results.findings += findings.of_connections(connections.connect())
        if not results.fatal:
            _measure_wires(job, connections, results, say)
    finally:
        connections.close()
    # With a link that failed, or two backends, making the group would wait for minutes.
    if not results.fatal:
        _measure_group(job, options, results, say)


def _measure_wires(
    job: Job, connections: Connections, results: Results, say: Callable[[str], None]
) -> None:
    results.clocks = measure_clocks(job, connections)
    results.findings += findings.of_clocks(results.clocks)
    channels: dict[int, Channel] = {}

    def channel_to(other: int) -> Channel:
        if other not in channels:
            channels[other] = SocketChannel(connections.between(other), job.timeout)
        return channels[other]

    results.links = _links(job, "TCP", results.nodes, channel_to, say, findings.TCP_FASTEST)
    results.findings += findings.of_links(results.links, findings.TCP_FASTEST)


def _links(
    job: Job,
    name: str,
    nodes: Sequence[int],
    channel_to: Callable[[int], Channel],
    say: Callable[[str], None],
    fastest: float = math.inf,
) -> list[Link]:
    """Measure the links, and those that look slow again, alone: noise does not come back."""
    pairs = chosen_pairs(job.world_size)
    say(f"measuring {len(pairs)} pairs of ranks over {name}, in both directions")
    links = measure_rounds(job, name, rounds(pairs, nodes), nodes, channel_to)
    for attempt in ("a second", "a third"):
        again = findings.suspects(links, fastest)[:_MOST_AGAIN]
        if not again:
            break
        say(f"measuring {len(again)} slow pairs {attempt} time")
        alone = [[pair] for pair in again]
        more = measure_rounds(job, f"{name}, {attempt} time", alone, nodes, channel_to)
        newer = {(link.source, link.target): link for link in more}
        links = [link.better_of(newer.get((link.source, link.target), link)) for link in links]
    return links


def _measure_group(
    job: Job, options: argparse.Namespace, results: Results, say: Callable[[str], None]
) -> None:
    with _process_group(job):
        say("computing on all ranks at the same time")
        results.speeds = _speeds(job)
        results.findings += findings.of_speeds(results.speeds)
        if job.world_size > 1:
            if job.backend == "nccl":
                results.nccl_links = _links(
                    job,
                    "NCCL",
                    results.nodes,
                    lambda other: GroupChannel(other, job.device, job.timeout),
                    say,
                )
                results.findings += findings.of_links(results.nccl_links)
                if results.fatal:
                    return
            say("measuring collectives")
            results.collectives = measure_collectives(
                ProcessGroupExchange(None, job.device), seconds=options.seconds / 2
            )
        if options.model or options.numel:
            _measure_steps(job, options, results, say)
    if options.script:
        _measure_steps(job, options, results, say)


def _speeds(job: Job) -> list[Speed]:
    speeds = measure_speed(job, "speed")
    if not findings.of_speeds(speeds):
        return speeds
    again = measure_speed(job, "speed, a second time")
    return [one.with_windows_of(other) for one, other in zip(speeds, again, strict=True)]


def _measure_steps(
    job: Job, options: argparse.Namespace, results: Results, say: Callable[[str], None]
) -> None:
    modes = MODES if job.world_size > 1 else (NO_EXCHANGE,)
    phases = Phases(job, options.seconds, modes)
    if options.model:
        results.workload = f"{options.model}, batch {options.batch or 8} per rank"
        say(f"training {results.workload}")
        train_named(options.model, options.batch or 8, job, phases)
    elif options.numel:
        results.workload = f"{options.numel:,} parameters, computing {options.step_ms:g} ms"
        say(f"training {results.workload}")
        train_synthetic(options.numel, options.step_ms / 1e3, job, phases)
    else:
        results.workload = " ".join(options.script)
        say(f"running {results.workload}")
        # With --json -, stdout is for the JSON.
        out = redirect_stdout(sys.stderr) if options.json == "-" else nullcontext()
        with out:
            run_script(options.script, phases)
        _leave_group(job, "script")
    rows = [[each.mode, each.seconds] for each in phases.results()]
    ranks = [
        [StepTimes(mode, tuple(seconds)) for mode, seconds in each]
        for each in job.gather("steps", rows)
    ]
    results.rows = measured_rows(ranks)
    if results.collectives is None:
        return
    say("predicting other methods")
    (alone,) = (row.seconds for row in results.rows if row.method == NO_EXCHANGE)
    facts = results.facts[job.rank]
    predicted = predicted_rows(
        job,
        phases.parameters,
        alone,
        results.collectives,
        1.0 if job.backend == "nccl" else facts.cores / facts.local_world_size,
        options.seconds,
    )
    results.verdict = judge(results.rows, predicted)


@contextmanager
def _process_group(job: Job) -> Iterator[None]:
    """Make a default process group, on keys of its own: a script makes another one later."""
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    dist.init_process_group(
        job.backend,
        store=PrefixStore("group", job.store),
        rank=job.rank,
        world_size=job.world_size,
        # Gradients of a large model on a slow link take longer than one answer.
        timeout=timedelta(seconds=20 * job.timeout),
    )
    yield
    _leave_group(job, "doctor")


def _leave_group(job: Job, name: str) -> None:
    """End the process group, if there still is one, on all ranks together."""
    # gloo can abort a rank whose peers have gone, or whose DDP model is still there.
    gc.collect()
    job.barrier(f"leaving the group of {name}")
    if dist.is_initialized():
        dist.destroy_process_group()


def _reporter(job: Job) -> Callable[[str], None]:
    began = time.monotonic()

    def say(text: str) -> None:
        if job.rank == 0:
            print(f"[{time.monotonic() - began:3.0f} s] {text}", file=sys.stderr, flush=True)

    return say
