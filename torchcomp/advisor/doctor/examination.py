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
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from torchcomp.advisor.collectives import CollectiveTimes, measure_collectives
from torchcomp.advisor.doctor import findings
from torchcomp.advisor.doctor.connections import Connections
from torchcomp.advisor.doctor.findings import Finding
from torchcomp.advisor.doctor.job import Job
from torchcomp.advisor.doctor.links import (
    Channel,
    GroupChannel,
    Link,
    SocketChannel,
    chosen_pairs,
    measure_rounds,
    rounds,
)
from torchcomp.advisor.doctor.phases import MODES, NO_EXCHANGE, Phases
from torchcomp.advisor.doctor.ranks import (
    Clock,
    Facts,
    Speed,
    measure_clocks,
    measure_speed,
    own_facts,
)
from torchcomp.advisor.doctor.verdict import (
    Row,
    Verdict,
    judge,
    measured_rows,
    predicted_rows,
)
from torchcomp.advisor.doctor.workloads import run_script, train_named, train_synthetic
from torchcomp.exchange import ProcessGroupExchange

_MOST_AGAIN = 24  # pairs that are measured a second and a third time


@dataclass
class Results:
    """What was measured, as far as it got. All ranks have the same, unless there is an error."""

    backend: str = ""  # "gloo" or "nccl"
    facts: list[Facts] = field(default_factory=list)  # of every rank, as are clocks and speeds
    findings: list[Finding] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)  # over TCP, each direction separately
    nccl_links: list[Link] = field(default_factory=list)
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


def measure(job: Job, options: argparse.Namespace, results: Results) -> None:
    """Measure a job as its options say, and fill in the results, step by step."""
    began = time.monotonic()
    try:
        _Examination(job, options, results, began).run()
    finally:
        results.seconds = time.monotonic() - began


@dataclass(frozen=True)
class _Examination:
    """One examination of a job. Its methods fill in the results, in order."""

    job: Job
    options: argparse.Namespace
    results: Results
    began: float

    def run(self) -> None:
        """Measure everything, until something shows that the ranks cannot train together."""
        job, options, results = self.job, self.options, self.results
        results.backend = job.backend
        self._say("connecting every pair of ranks")
        connections = Connections(job)
        try:
            rows = job.gather("facts", vars(own_facts(job, connections.address)))
            results.facts = [Facts(**row) for row in rows]
            results.findings += findings.of_facts(results.facts)
            results.findings += findings.of_connections(connections.connect())
            if not results.fatal:
                self._measure_wires(connections)
        finally:
            connections.close()
        # With a link that failed, or two backends, making the group would wait for minutes.
        if not results.fatal:
            _make_group(job)
            self._measure_group()
            _leave_group(job, "doctor")
        if options.script and not results.fatal:
            self._measure_steps()

    def _say(self, text: str) -> None:
        if self.job.rank == 0:
            passed = time.monotonic() - self.began
            print(f"[{passed:3.0f} s] {text}", file=sys.stderr, flush=True)

    def _measure_wires(self, connections: Connections) -> None:
        job, results, fastest = self.job, self.results, findings.TCP_FASTEST
        results.clocks = measure_clocks(job, connections)
        results.findings += findings.of_clocks(results.clocks)
        results.links = self._links(
            "TCP", lambda other: SocketChannel(connections.between(other), job.timeout), fastest
        )
        results.findings += findings.of_links(results.links, fastest)

    def _links(
        self, name: str, channel_to: Callable[[int], Channel], fastest: float = math.inf
    ) -> list[Link]:
        """Measure the links, and those that look slow again, alone: noise does not come back."""
        job, nodes = self.job, [each.node for each in self.results.facts]
        pairs = chosen_pairs(job.world_size)
        self._say(f"measuring {len(pairs)} pairs of ranks over {name}, in both directions")
        links = measure_rounds(job, name, rounds(pairs, nodes), nodes, channel_to)
        for attempt in ("a second", "a third"):
            again = findings.suspects(links, fastest)[:_MOST_AGAIN]
            if not again:
                break
            self._say(f"measuring {len(again)} slow pairs {attempt} time")
            alone = [[pair] for pair in again]
            more = measure_rounds(job, f"{name}, {attempt} time", alone, nodes, channel_to)
            newer = {(link.source, link.target): link for link in more}
            links = [link.better_of(newer.get((link.source, link.target), link)) for link in links]
        return links

    def _measure_group(self) -> None:
        job, results, options = self.job, self.results, self.options
        self._say("computing on all ranks at the same time")
        results.speeds = measure_speed(job, "speed")
        if findings.of_speeds(results.speeds):
            both = zip(results.speeds, measure_speed(job, "speed, a second time"), strict=True)
            results.speeds = [Speed(a.seconds + b.seconds, (a.busy + b.busy) / 2) for a, b in both]
        results.findings += findings.of_speeds(results.speeds)
        if job.world_size > 1:
            if job.backend == "nccl":
                results.nccl_links = self._links(
                    "NCCL", lambda other: GroupChannel(other, job.device, job.timeout)
                )
                results.findings += findings.of_links(results.nccl_links)
                if results.fatal:
                    return
            self._say("measuring collectives")
            exchange = ProcessGroupExchange(None, job.device)
            results.collectives = measure_collectives(exchange, seconds=options.seconds / 2)
        if options.model or options.numel:
            self._measure_steps()

    def _measure_steps(self) -> None:
        job, results, seconds = self.job, self.results, self.options.seconds
        phases = Phases(job, seconds, MODES if job.world_size > 1 else (NO_EXCHANGE,))
        self._train(phases)
        results.rows = measured_rows(job.gather("steps", phases.results()))
        if results.collectives is None:
            return
        self._say("predicting other methods")
        (alone,) = (row.seconds for row in results.rows if row.method == NO_EXCHANGE)
        facts, times = results.facts[job.rank], results.collectives
        cores = 1.0 if job.backend == "nccl" else facts.cores / facts.local_world_size
        predicted = predicted_rows(job, phases.parameters, alone, times, cores, seconds)
        results.verdict = judge(results.rows, predicted)

    def _train(self, phases: Phases) -> None:
        """Train what the options name, until all phases are measured."""
        job, options, results = self.job, self.options, self.results
        if options.model:
            batch = options.batch or 8
            results.workload = f"{options.model}, batch {batch} per rank"
            self._say(f"training {results.workload}")
            train_named(options.model, batch, job, phases)
        elif options.numel:
            results.workload = f"{options.numel:,} parameters, computing {options.step_ms:g} ms"
            self._say(f"training {results.workload}")
            train_synthetic(options.numel, options.step_ms / 1e3, job, phases)
        else:
            results.workload = " ".join(options.script)
            self._say(f"running {results.workload}")
            # With --json -, stdout is for the JSON.
            with redirect_stdout(sys.stderr) if options.json == "-" else nullcontext():
                run_script(options.script, phases)
            _leave_group(job, "script")


def _make_group(job: Job) -> None:
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


def _leave_group(job: Job, name: str) -> None:
    """End the process group, if there still is one, on all ranks together."""
    # gloo can abort a rank whose peers have gone, or whose DDP model is still there.
    gc.collect()
    job.barrier(f"leaving the group of {name}")
    if dist.is_initialized():
        dist.destroy_process_group()
