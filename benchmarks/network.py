"""Measure training on hosts that share one machine, connected by shaped links.

    python -m benchmarks.network                  # step time and bytes on the whole grid
    python -m benchmarks.network --nodes          # several ranks behind each link
    python -m benchmarks.network --accuracy       # time to a test accuracy
    python -m benchmarks.network --loopback       # overhead of the hook without a slow network
    python -m benchmarks.network --quick          # half a minute: does it work?

Results are rows of CSV files in the folder --out, written as they are measured. --resume skips
measurements that have a row. benchmarks/README.md explains the columns. Shaped links, which all but
--loopback use, need root, iproute2 and gcc.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from benchmarks.arguments import parsed_by, table_parser
from benchmarks.net import program
from benchmarks.net.hosts import Hosts
from benchmarks.net.job import Job
from benchmarks.net.launch import LaunchError, free_port, results
from benchmarks.net.names import BASELINES, BF16, FLOOR, PLAIN, POWERSGD
from benchmarks.net.rows import (
    ACCURACY,
    NODES,
    STEPS,
    Table,
    conditions,
    milliseconds,
    step_columns,
    step_times,
)

# The port of the rendezvous. Every host is its own namespace, so no other program uses it.
_PORT = 29500
OURS = 'bidirectional(topk(0.01, values="int8"), topk(0.01, values="int8"))'
QSR = "qsr(alpha=0.2, h_base=4)"
BETWEEN_NODES = (
    "mean",
    "ef(topk(0.01))",
    'ef(topk(0.01, values="int8"))',
    *(
        f'bidirectional(topk({ratio}, values="int8"), topk({ratio}, values="int8"), '
        f'selection="{selection}")'
        for selection in ("shard", "exact")
        for ratio in (0.01, 0.001)
    ),
    'ef(quantize("int8"))',
    'bidirectional(quantize("int8"), quantize("int8"))',
    'bidirectional(quantize("int4"), quantize("int4"))',
)
MODELS = ("smallcnn", "resnet18", "mlp")


class Link(NamedTuple):
    """A number of hosts, the links between them, and the ranks behind each link.

    0 Mbit/s means the unshaped loopback.
    """

    hosts: int
    mbit: int
    delay_us: int
    ranks: int = 1

    @property
    def world(self) -> int:
        return self.hosts * self.ranks

    def __str__(self) -> str:
        ranks = f" of {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.hosts:2} hosts{ranks} {self.mbit:5} Mbit/s"


class Way(NamedTuple):
    """A method, and the levels of its exchange.

    1 is an exchange among all ranks, 2 one inside the hosts and one between them. Baselines have 1.
    """

    method: str
    levels: int = 1

    def __str__(self) -> str:
        return self.method if self.levels == 1 else f"{self.method} in two levels"


def main() -> None:
    arguments = parse(sys.argv[1:])
    program.run(lambda: grid(arguments), shaped=not arguments.loopback)


def parse(words: list[str]) -> argparse.Namespace:
    parser = table_parser(__doc__, quick="a test run of half a minute")
    add = parser.add_argument
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--nodes", action="store_true", help="several ranks behind each link")
    mode.add_argument("--accuracy", action="store_true", help="time to a test accuracy")
    mode.add_argument("--loopback", action="store_true", help="two ranks, links not shaped")
    add("--hosts", type=int, nargs="+", metavar="N")
    add("--ranks", type=int, nargs="+", help="--nodes: ranks of each host [2 4]")
    add("--levels", type=int, nargs="+", choices=(1, 2), default=[1, 2], help="--nodes [1 2]")
    add("--mbit", type=int, nargs="+", metavar="RATE", help="Mbit/s of every link")
    add("--delay-us", type=int, default=500, help="delay one way [500]")
    add("--models", nargs="+", choices=MODELS)
    named = ", ".join(BASELINES)
    add("--methods", nargs="+", metavar="METHOD", help=f"{named}, or any spec of torchcomp")
    add("--batch", type=int, default=16, help="images per rank and step [16]")
    add("--seconds", type=float, default=20.0, help="time to measure each method [20]")
    add("--least", type=int, default=3, help="fewest steps to measure [3]")
    add("--rounds", type=int, default=5, help="--loopback: repetitions of all methods [5]")
    add("--target", type=float, default=0.99, help="--accuracy: test accuracy to reach [0.99]")
    add("--seeds", type=int, default=3, help="--accuracy: runs per method [3]")
    rates = "--accuracy: peak learning rates to try [0.1]"
    add("--rates", type=float, nargs="+", default=[0.1], help=rates)
    add("--timeout", type=float, default=600.0, help="seconds without a result [600]")
    parsed = parsed_by(parser, words, "benchmarks")
    for name, value in _defaults(parsed).items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)
    if parsed.quick:
        parsed.seconds, parsed.seeds, parsed.rounds = min(parsed.seconds, 2.0), 1, 1
    return parsed


def _defaults(parsed: argparse.Namespace) -> dict[str, Any]:
    """Values for the arguments that were not passed; they depend on the mode."""
    values = {
        "methods": [*BASELINES, OURS],
        "hosts": [4, 8, 16],
        "ranks": [2, 4],
        "mbit": [10, 100, 1000],
        "models": ["smallcnn", "resnet18"],
    }
    if parsed.loopback:
        values |= {"methods": [PLAIN, BF16, "mean", OURS], "models": ["resnet18"]}
    elif parsed.quick:
        values |= {"hosts": [2], "ranks": [2], "mbit": [100], "models": ["smallcnn"]}
    elif parsed.accuracy:
        values |= {"methods": [*BASELINES, OURS, QSR]}
        values |= {"hosts": [4], "mbit": [10, 100], "models": ["smallcnn"]}
    elif parsed.nodes:
        values |= {"methods": [FLOOR, PLAIN, BF16, POWERSGD, *BETWEEN_NODES]}
        values |= {"hosts": [2, 4], "mbit": [100, 1000, 10000]}
    return values


# --- Measurements ---------------------------------------------------------------------------------


def grid(arguments: argparse.Namespace) -> list[str]:
    """Measure every combination; return the ones that failed."""
    links = [Link(hosts=2, mbit=0, delay_us=0)]
    if not arguments.loopback:
        behind = arguments.ranks if arguments.nodes else [1]
        links = [
            Link(hosts, mbit, arguments.delay_us, ranks)
            for hosts, ranks, mbit in product(arguments.hosts, behind, arguments.mbit)
        ]
    return [
        failure
        for link, model in product(links, arguments.models)
        for failure in measure(arguments, link, model)
    ]


def measure(arguments: argparse.Namespace, link: Link, model: str) -> list[str]:
    """Measure the methods on one link; return the ones that failed."""
    table = table_of(arguments)
    levels = arguments.levels if arguments.nodes else [1]
    # The levels of a method follow each other.
    ways = [Way(*each) for each in product(arguments.methods, levels)]
    ways = [way for way in ways if way.levels == 1 or way.method not in BASELINES]
    pending = [way for way in ways if not _is_done(arguments, table, link, model, way)]
    failures = []
    while pending:
        done: list[Way] = []
        try:
            with _job(arguments, link, model, pending) as (job, prefixes):
                for result in results(job, prefixes):
                    record(table, arguments, link, model, result)
                    done.append(Way(result["method"], result.get("levels", 1)))
        except LaunchError as error:
            # Results arrive in order, so the method of the next one has failed. Launch the others
            # again without it, because its workers are gone.
            runs = len(arguments.rates) * arguments.seeds if arguments.accuracy else 1
            culprit = pending[len(done) // runs % len(pending)]
            print(f"error: {culprit}: {error}", file=sys.stderr, flush=True)
            failures.append(f"{culprit} ({link}, {model})")
            done.append(culprit)
        pending = [way for way in pending if way not in done]
    return failures


@contextmanager
def _job(
    arguments: argparse.Namespace, link: Link, model: str, ways: list[Way]
) -> Iterator[tuple[Job, list[list[str]]]]:
    """A context with the hosts of a link: the job, and the prefix of each rank's command."""
    rounds = arguments.rounds if arguments.loopback else 1
    job = partial(
        Job,
        task="accuracy" if arguments.accuracy else "steps",
        model=model,
        batch=arguments.batch,
        methods=tuple(way.method for way in ways),
        levels=tuple(way.levels for way in ways),
        ranks=link.ranks,
        world=link.world,
        counted=not arguments.loopback,
        # The time per method is divided over the rounds.
        seconds=arguments.seconds / rounds,
        least=arguments.least,
        rounds=rounds,
        seeds=tuple(range(arguments.seeds)),
        rates=tuple(arguments.rates),
        target=arguments.target,
        timeout=arguments.timeout,
    )
    if arguments.loopback:
        yield job(address="127.0.0.1", port=free_port(), interface="lo"), [[]] * link.world
        return
    with Hosts(link.hosts, link.mbit, link.delay_us) as hosts:
        # Ranks are numbered host by host, as torchrun numbers them.
        prefixes = [hosts.inside(rank // link.ranks) for rank in range(link.world)]
        yield job(address=hosts.address(0), port=_PORT, interface=hosts.interface), prefixes


# --- Rows -----------------------------------------------------------------------------------------


def table_of(arguments: argparse.Namespace) -> Table:
    if arguments.loopback:
        return Table(arguments.out / "loopback.csv", STEPS)
    if arguments.accuracy:
        return Table(arguments.out / "time_to_accuracy.csv", ACCURACY)
    if arguments.nodes:
        return Table(arguments.out / "nodes.csv", NODES)
    return Table(arguments.out / "network.csv", STEPS)


def identity(arguments: argparse.Namespace, link: Link, model: str, way: Way) -> dict[str, Any]:
    """The columns that identify a measurement; accuracy runs add the learning rate and the seed."""
    named: dict[str, Any] = {"hosts": link.hosts, "mbit": link.mbit, "delay_us": link.delay_us}
    named |= {"model": model, "batch": arguments.batch, "method": way.method}
    return named | ({"ranks": link.ranks, "levels": way.levels} if arguments.nodes else {})


def _is_done(arguments: argparse.Namespace, table: Table, link: Link, model: str, way: Way) -> bool:
    named = identity(arguments, link, model, way)
    if not arguments.resume:
        return False
    if not arguments.accuracy:
        return table.has(**named)
    runs = [(lr, seed) for lr in arguments.rates for seed in range(arguments.seeds)]
    return all(table.has(**named, rate=lr, seed=seed) for lr, seed in runs)


def record(
    table: Table, arguments: argparse.Namespace, link: Link, model: str, result: dict[str, Any]
) -> None:
    way = Way(result["method"], result.get("levels", 1))
    row = {**conditions(), **identity(arguments, link, model, way)}
    row |= {"parameters": result["parameters"]}
    if arguments.accuracy:
        row |= {"rate": result["rate"], "seed": result["seed"], "target": arguments.target}
        row |= accuracy_columns(result["ranks"])
        summary = f"{row['seconds']:9.2f} s to {row['accuracy']:.3f}"
    else:
        row |= steps_columns(result["ranks"], counted=not arguments.loopback)
        summary = f"{row['step_ms']:9.1f} ms, {row['payload_bytes'] or 0:12,.0f} bytes per step"
    if arguments.nodes:
        row |= inside_columns(result["ranks"])
    table.add(row)
    print(f"{link} {model:8} {summary}  {way}", flush=True)


def steps_columns(ranks: list[dict[str, Any]], *, counted: bool) -> dict[str, Any]:
    """The columns of a step benchmark: means over the ranks, and the median time over the steps."""
    count = len(ranks[0]["times"])
    row: dict[str, Any] = {"steps": count, **step_columns(step_times(ranks))}
    row |= {f"{name}_ms": milliseconds(_mean(ranks, name) / count) for name in ("user", "system")}
    sent = {"wire_bytes": "wire", "packets": "packets", "payload_bytes": "payload"}
    sent |= {"tcp_bytes": "tcp"}
    row |= {k: round(_mean(ranks, v) / count) if counted else "" for k, v in sent.items()}
    handle_bytes = _mean(ranks, "counted")
    return row | {"counted_bytes": round(handle_bytes / count) if handle_bytes else ""}


def inside_columns(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The columns of bytes within a host: of the host, and of a rank by its handle."""
    count = len(ranks[0]["times"])
    counted = _mean(ranks, "counted_inside")
    return {
        "inside_bytes": round(_mean(ranks, "inside") / count),
        "counted_inside_bytes": round(counted / count) if counted else "",
    }


def accuracy_columns(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The columns of an accuracy benchmark."""
    # The accuracy is that of rank 0's weights, and all ranks take the same steps.
    first = ranks[0]
    row = {name: first[name] for name in ("reached", "accuracy", "steps")}
    row["seconds"] = round(statistics.mean(rank["seconds"] for rank in ranks), 4)
    row |= {f"{k}_bytes": round(_mean(ranks, k)) for k in ("wire", "payload")}
    return row


def _mean(ranks: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(rank[name] for rank in ranks)


if __name__ == "__main__":
    main()
