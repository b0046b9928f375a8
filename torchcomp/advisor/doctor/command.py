"""Command: measure a job in an order in which nothing hangs, print the report, return a status."""

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, redirect_stdout, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from torchcomp.advisor.collectives import measure_collectives
from torchcomp.advisor.doctor import findings, measures
from torchcomp.advisor.doctor.job import Connections, Job, NotMeasured, join
from torchcomp.advisor.doctor.report import Results, as_dict, status, text
from torchcomp.advisor.doctor.training import MODES, NO_EXCHANGE, Phases, train, workload_of
from torchcomp.advisor.named_models import build_named
from torchcomp.advisor.units import wrapped
from torchcomp.exchange import ProcessGroupExchange
from torchcomp.specs.errors import SpecError

_MOST_AGAIN = 24  # pairs that are measured a second and a third time

Say = Callable[[str], None]
"""Tells the user what is measured now."""


def measure(job: Job, options: argparse.Namespace, results: Results) -> None:
    """Measure a job as its options say, until something shows that its ranks cannot train."""
    began = time.monotonic()

    def say(text: str) -> None:
        if job.rank == 0:
            passed = time.monotonic() - began
            print(f"[{passed:3.0f} s] {text}", file=sys.stderr, flush=True)

    try:
        results.backend = job.backend
        say("connecting every pair of ranks")
        with closing(Connections(job)) as connections:
            rows = job.gather("facts", vars(measures.own_facts(job, connections.address)))
            results.facts = [measures.Facts(**row) for row in rows]
            results.findings += findings.of_facts(results.facts)
            results.findings += findings.of_connections(connections.connect())
            if not results.fatal:
                results.clocks = measures.measure_clocks(job)
                results.findings += findings.of_clocks(results.clocks)
                results.links = _links(connections, [f.node for f in results.facts], say)
                results.findings += findings.of_links(results.links)
        # With a link that failed, or two backends, making the group would wait for minutes.
        if results.fatal:
            return
        _make_group(job)
        _measure_group(job, options, results, say)
        if options.model or options.numel:
            _measure_steps(job, options, results, say)
        _leave_group(job, "doctor")
        if options.script:
            _measure_steps(job, options, results, say)
    finally:
        results.seconds = time.monotonic() - began


def _links(connections: Connections, nodes: Sequence[int], say: Say) -> list[measures.Link]:
    """Measure the links, and those that look slow again, alone: noise does not come back."""
    pairs = measures.chosen_pairs(len(nodes))
    say(f"measuring {len(pairs)} pairs of ranks over TCP, in both directions")
    links = measures.measure_rounds(connections, "links", measures.rounds(pairs, nodes), nodes)
    for attempt in ("a second", "a third"):
        again = findings.suspects(links)[:_MOST_AGAIN]
        if not again:
            break
        say(f"measuring {len(again)} slow pairs {attempt} time")
        alone = [[pair] for pair in again]
        more = measures.measure_rounds(connections, f"links, {attempt} time", alone, nodes)
        newer = {(link.source, link.target): link for link in more}
        links = [link.better_of(newer.get((link.source, link.target), link)) for link in links]
    return links


def _measure_group(job: Job, options: argparse.Namespace, results: Results, say: Say) -> None:
    say("computing on all ranks at the same time")
    results.speeds = measures.measure_speed(job, "speed")
    if findings.of_speeds(results.speeds):
        both = zip(results.speeds, measures.measure_speed(job, "speed, a second time"), strict=True)
        results.speeds = [
            measures.Speed([*a.seconds, *b.seconds], (a.busy + b.busy) / 2) for a, b in both
        ]
    results.findings += findings.of_speeds(results.speeds)
    if job.world_size > 1:
        say("measuring collectives")
        exchange = ProcessGroupExchange(None, job.device)
        results.collectives = measure_collectives(exchange, seconds=options.seconds / 2)


def _measure_steps(job: Job, options: argparse.Namespace, results: Results, say: Say) -> None:
    phases = Phases(job, options.seconds, MODES if job.world_size > 1 else (NO_EXCHANGE,))
    results.workload = workload_of(options)
    say(f"training: {results.workload}")
    # With --json -, stdout is for the JSON.
    with redirect_stdout(sys.stderr) if options.json == "-" else nullcontext():
        train(options, job, phases)
    if options.script:
        _leave_group(job, "script")
    results.rows = findings.measured_rows(job.gather("steps", phases.results()))
    if results.collectives is None:
        return
    say("predicting other methods")
    (alone,) = (row.seconds for row in results.rows if row.method == NO_EXCHANGE)
    facts = results.facts[job.rank]
    cores = 1.0 if job.backend == "nccl" else facts.cores / facts.local_world_size
    predicted = findings.predicted_rows(
        job, phases.parameters, alone, results.collectives, cores, options.seconds
    )
    results.verdict = findings.judge(results.rows, predicted)


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
    # gloo can abort a rank whose peers have gone, or whose DDP model is still there.
    gc.collect()
    job.barrier(f"leaving the group of {name}")
    if dist.is_initialized():
        dist.destroy_process_group()


def examine(options: argparse.Namespace) -> int:
    """Examine the job of this process; return the exit status. See docs/doctor.md."""
    _check(options)
    results, job = Results(), None
    try:
        job = join(options.backend, options.timeout)
        measure(job, options, results)
    except Exception as error:
        if job is None and isinstance(error, SpecError):
            raise
        expected = isinstance(error, NotMeasured)
        results.error = str(error) if expected else f"{type(error).__name__}: {error}"
        # Of a script that failed, or of what was not foreseen, such as too little memory.
        cause = error.__cause__ if expected else error
        if cause is not None:
            sys.stderr.write("".join(traceback.format_exception(cause)))
    # After an error, the first rank that has it prints.
    if job is None or (job.is_first("report") if results.error else job.rank == 0):
        _print(results, options.json)
    if job is not None and not results.error:
        # torchrun ends the other ranks when one exits: rank 0 must have printed.
        with suppress(NotMeasured):
            job.barrier("printed")
    return status(results)


def _check(options: argparse.Namespace) -> None:
    given = [name for name in ("model", "numel", "script") if getattr(options, name) is not None]
    if len(given) > 1:
        raise SpecError(f"--{given[0]} and --{given[1]} exclude each other: pass one of them")
    if options.batch is not None and options.model is None:
        raise SpecError("--batch is for --model")
    if options.numel is not None and options.step_ms is None:
        raise SpecError("--numel needs --step-ms, the compute time of a step without an exchange")
    if options.step_ms is not None and options.numel is None:
        raise SpecError("--step-ms is for --numel: the other steps are measured")
    if options.script is not None:
        name, *rest = options.script or [""]
        if not name or (name == "-m" and not rest):
            raise SpecError(
                "--script needs a file, or -m and a module, and takes the rest of the line"
            )
        if name != "-m" and not Path(name).is_file():
            raise SpecError(f"--script {name}: there is no such file in {Path.cwd()}")
    if options.model is not None:
        build_named(options.model)  # without memory
    if options.json not in (None, "-") and os.environ.get("RANK", "0") == "0":
        file = Path(options.json).absolute()
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise SpecError(
                f"--json {options.json!r} cannot be written: pass the name of a file in a folder "
                "that exists, or -"
            )


def _print(results: Results, path: str | None) -> None:
    if path != "-" and results.facts:
        print(f"\n{text(results)}", flush=True)
    if results.error:
        # In one piece, because other ranks write at the same time.
        sys.stderr.write(wrapped("", f"torchcomp: {results.error}") + "\n")
    if path == "-":
        print(json.dumps(as_dict(results), indent=1), flush=True)
    elif path is not None:
        Path(path).write_text(json.dumps(as_dict(results), indent=1) + "\n")
    if status(results) and "TORCHELASTIC_RUN_ID" in os.environ:
        note = f"torchcomp: exit status {status(results)}, which torchrun reports below"
        print(note, file=sys.stderr, flush=True)
