"""Measure training on hosts that share one machine and are joined by shaped links.

    python benchmarks/network.py                  # step time and bytes, over the whole grid
    python benchmarks/network.py --accuracy       # time to a test accuracy
    python benchmarks/network.py --loopback       # cost of the hook where the network is free
    python benchmarks/network.py --quick          # half a minute, to see that it works

Results are rows of CSV in --out, written as they are measured; --resume leaves out those that are
there. benchmarks/README.md says what the columns are, and benchmarks/report.py makes
docs/performance.md of them. The first and second need root, iproute2 and gcc.
"""

import argparse
import signal
import socket
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from net.hosts import Hosts
from net.job import Job
from net.launch import LaunchError, results
from net.names import BASELINES, PLAIN
from net.rows import ACCURACY, STEPS, Table, conditions
from net.shell import ShellError, missing

_HERE = Path(__file__).parent
_PORT = 29500
OURS = 'bidirectional(topk(0.01, values="int8"), topk(0.01, values="int8"))'
QSR = "qsr(alpha=0.2, h_base=4)"
MODELS = ("smallcnn", "resnet18", "mlp")


@dataclass(frozen=True)
class Link:
    """Hosts and the links between them; 0 Mbit/s stands for the loopback, which is not shaped."""

    hosts: int
    mbit: int
    delay_us: int


def main() -> None:
    arguments = parse(sys.argv[1:])
    # SIGTERM ends like Ctrl-C: through every finally.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not arguments.loopback and missing():
        sys.exit(f"error: {missing()}")
    try:
        failures = loopback(arguments) if arguments.loopback else grid(arguments)
    except ShellError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if failures:
        sys.exit("failed: " + "; ".join(failures))


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--accuracy", action="store_true", help="time to a test accuracy")
    mode.add_argument("--loopback", action="store_true", help="two ranks, links not shaped")
    add("--quick", action="store_true", help="half a minute that shows whether it works")
    add("--resume", action="store_true", help="leave out what has a row already")
    add("--out", type=Path, help="folder of the CSV files [benchmarks/results]")
    add("--hosts", type=int, nargs="+", metavar="N")
    add("--mbit", type=int, nargs="+", metavar="RATE", help="Mbit/s of every link")
    add("--delay-us", type=int, default=500, help="one way [500]")
    add("--models", nargs="+", choices=MODELS)
    named = ", ".join(BASELINES)
    add("--methods", nargs="+", metavar="METHOD", help=f"of {named}, or specs of torchcomp")
    add("--batch", type=int, default=16, help="images of a rank [16]")
    add("--seconds", type=float, default=20.0, help="to measure of a method [20]")
    add("--least", type=int, default=3, help="steps to measure at least [3]")
    add("--rounds", type=int, default=5, help="--loopback: repetitions of all methods [5]")
    add("--target", type=float, default=0.99, help="--accuracy: test accuracy to reach [0.99]")
    add("--seeds", type=int, default=3, help="--accuracy: runs of a method [3]")
    add("--rates", type=float, nargs="+", default=[0.1], help="--accuracy: learning rates [0.1]")
    add("--timeout", type=float, default=600.0, help="seconds without a result [600]")
    parsed = parser.parse_args(words)
    for name, value in _defaults(parsed).items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)
    if parsed.quick:
        parsed.seconds, parsed.seeds, parsed.rounds = min(parsed.seconds, 2.0), 1, 1
    return parsed


def _defaults(parsed: argparse.Namespace) -> dict[str, Any]:
    """What is measured unless the command line says otherwise."""
    out = _HERE.parent / "runs" / "benchmarks" if parsed.quick else _HERE / "results"
    both = {"out": out, "methods": [*BASELINES, OURS]}
    if parsed.loopback:
        return {**both, "methods": [PLAIN, "mean", OURS], "models": ["resnet18"]}
    if parsed.quick:
        return {**both, "hosts": [2], "mbit": [100], "models": ["smallcnn"]}
    if parsed.accuracy:
        methods = [*BASELINES, OURS, QSR]
        return {**both, "methods": methods, "hosts": [4], "mbit": [10, 100], "models": ["smallcnn"]}
    return {
        **both,
        "hosts": [4, 8, 16],
        "mbit": [10, 100, 1000],
        "models": ["smallcnn", "resnet18"],
    }


# --- Shaped hosts ---------------------------------------------------------------------------------


def grid(arguments: argparse.Namespace) -> list[str]:
    """Measure every combination; return what failed."""
    failures = []
    for hosts in arguments.hosts:
        for mbit in arguments.mbit:
            link = Link(hosts, mbit, arguments.delay_us)
            for model in arguments.models:
                failures += measure(arguments, link, model)
    return failures


def measure(arguments: argparse.Namespace, link: Link, model: str) -> list[str]:
    """Measure the methods on one link, launching again without a method that fails."""
    table = table_of(arguments)
    pending = [m for m in arguments.methods if not _is_done(arguments, table, link, model, m)]
    failures = []
    while pending:
        done: list[str] = []
        try:
            with Hosts(link.hosts, link.mbit, link.delay_us) as hosts:
                prefixes = [hosts.inside(host) for host in range(link.hosts)]
                job = shaped_job(arguments, link, model, hosts, tuple(pending))
                for result in results(job, prefixes):
                    record(table, arguments, link, model, result)
                    done.append(result["method"])
        except LaunchError as error:
            culprit = next(method for method in pending if method not in done)
            print(f"error: {culprit}: {error}", file=sys.stderr, flush=True)
            failures.append(f"{culprit} ({link.hosts} hosts, {link.mbit} Mbit/s, {model})")
            done.append(culprit)
        pending = [method for method in pending if method not in done]
    return failures


def shaped_job(
    arguments: argparse.Namespace, link: Link, model: str, hosts: Hosts, methods: tuple[str, ...]
) -> Job:
    return Job(
        task="accuracy" if arguments.accuracy else "steps",
        model=model,
        batch=arguments.batch,
        methods=methods,
        world=link.hosts,
        address=hosts.address(0),
        port=_PORT,
        interface=hosts.interface,
        counted=True,
        seconds=arguments.seconds,
        least=arguments.least,
        seeds=tuple(range(arguments.seeds)),
        rates=tuple(arguments.rates),
        target=arguments.target,
        timeout=arguments.timeout,
    )


# --- Rows -----------------------------------------------------------------------------------------


def table_of(arguments: argparse.Namespace) -> Table:
    if arguments.loopback:
        return Table(arguments.out / "loopback.csv", STEPS)
    if arguments.accuracy:
        return Table(arguments.out / "time_to_accuracy.csv", ACCURACY)
    return Table(arguments.out / "network.csv", STEPS)


def _is_done(
    arguments: argparse.Namespace, table: Table, link: Link, model: str, method: str
) -> bool:
    named = {**vars(link), "model": model, "batch": arguments.batch, "method": method}
    if not arguments.resume:
        return False
    if not arguments.accuracy:
        return table.has(**named)
    runs = [(rate, seed) for rate in arguments.rates for seed in range(arguments.seeds)]
    return all(table.has(**named, rate=rate, seed=seed) for rate, seed in runs)


def record(
    table: Table, arguments: argparse.Namespace, link: Link, model: str, result: dict[str, Any]
) -> None:
    row = {**conditions(), **vars(link), "model": model, "batch": arguments.batch}
    row |= {"parameters": result["parameters"], "method": result["method"]}
    if arguments.accuracy:
        row |= {"rate": result["rate"], "seed": result["seed"], "target": arguments.target}
        row |= accuracy_columns(result["ranks"])
        told = f"{row['seconds']:9.2f} s to {row['accuracy']:.3f}"
    else:
        row |= steps_columns(result["ranks"], counted=not arguments.loopback)
        told = f"{row['step_ms']:9.1f} ms, {row['payload_bytes'] or 0:12,.0f} bytes per step"
    table.add(row)
    where = f"{link.hosts:2} hosts {link.mbit:4} Mbit/s {model:8}"
    print(f"{where} {told}  {result['method']}", flush=True)


def steps_columns(ranks: list[dict[str, Any]], *, counted: bool) -> dict[str, Any]:
    """Columns of a step: means over the ranks; the time is the median over the steps."""
    count = len(ranks[0]["times"])
    times = [statistics.mean(step) for step in zip(*(r["times"] for r in ranks), strict=True)]
    low, middle, high = _quartiles(times)
    each = {name: _mean(ranks, name) for name in ("user", "system", "collective")}
    row: dict[str, Any] = {"steps": count, "step_ms": _ms(middle)}
    row |= {"step_ms_low": _ms(low), "step_ms_high": _ms(high)}
    row |= {f"{k}_ms": "" if v is None else _ms(v / count) for k, v in each.items()}
    sent = {"wire_bytes": "wire", "packets": "packets", "payload_bytes": "payload"}
    sent |= {"tcp_bytes": "tcp"}
    row |= {k: round(_mean(ranks, v) / count) if counted else "" for k, v in sent.items()}
    said = _mean(ranks, "counted")
    return row | {"counted_bytes": round(said / count) if said else ""}


def accuracy_columns(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    first = ranks[0]
    row = {name: first[name] for name in ("reached", "accuracy", "steps")}
    row["seconds"] = round(statistics.mean(rank["seconds"] for rank in ranks), 4)
    row |= {f"{k}_bytes": round(_mean(ranks, k)) for k in ("wire", "payload")}
    return row


def _mean(ranks: list[dict[str, Any]], name: str) -> Any:
    values = [rank[name] for rank in ranks]
    return None if None in values else statistics.mean(values)


def _quartiles(times: list[float]) -> list[float]:
    return statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


# --- Loopback -------------------------------------------------------------------------------------


def loopback(arguments: argparse.Namespace) -> list[str]:
    """Two ranks without shaping, every method in every round; one row per method and round."""
    table, link = table_of(arguments), Link(hosts=2, mbit=0, delay_us=0)
    failures = []
    for model in arguments.models:
        job = Job(
            task="steps",
            model=model,
            batch=arguments.batch,
            methods=tuple(arguments.methods),
            world=link.hosts,
            address="127.0.0.1",
            port=_free_port(),
            interface="lo",
            counted=False,
            seconds=arguments.seconds / arguments.rounds,
            least=arguments.least,
            rounds=arguments.rounds,
            timeout=arguments.timeout,
        )
        try:
            for result in results(job, [[]] * link.hosts):
                record(table, arguments, link, model, result)
        except LaunchError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            failures.append(f"loopback, {model}")
    return failures


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
