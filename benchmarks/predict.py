"""Compare predicted with measured step times, on hosts with shaped links.

    python -m benchmarks.predict                  # the whole grid
    python -m benchmarks.predict --quick          # two ranks, one link, one model
    python -m benchmarks.predict --again          # predict again from the stored measurements

Before the methods are measured on a link, its collectives are, and for each model the step without
any exchange and the work of each method. Predictions are made from these alone.

Results are rows of predict.csv in the folder --out, written as they are measured, and what the
predictions were made from is in predict.jsonl beside it. --resume skips what has a row. Needs
root, iproute2 and gcc.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.arguments import parsed_by, table_parser
from benchmarks.net import program, slices
from benchmarks.net.hosts import Hosts
from benchmarks.net.job import Job
from benchmarks.net.launch import LaunchError, results
from benchmarks.net.names import BF16, PLAIN
from benchmarks.net.predicted import Known
from benchmarks.net.rows import PREDICTIONS, Table, conditions

_PORT = 29500
Wanted = tuple[tuple[str, tuple[str, ...]], ...]
"""The models of a link, and the methods of each."""
METHODS = (
    PLAIN,
    BF16,
    "ef(topk(0.01))",
    'bidirectional(topk(0.01, values="int8"), topk(0.01, values="int8"))',
    'bidirectional(quantize("int4"), quantize("int4"))',
    'ef(quantize("int8"))',
    "powersgd(rank=1)",
    "every(4)",
)


@dataclass(frozen=True)
class Setup:
    """A number of hosts, the ranks of each, and the links between them.

    `models` are those that are measured on them, with `batch` images per rank and step.
    """

    hosts: int
    ranks: int
    mbit: int
    models: tuple[str, ...]
    delay_us: int = 500
    batch: int = 16

    @property
    def world(self) -> int:
        return self.hosts * self.ranks

    def __str__(self) -> str:
        ranks = f" of {self.ranks} ranks" if self.ranks > 1 else ""
        link = f"{self.hosts:2} hosts{ranks} {self.mbit:5} Mbit/s {self.delay_us} us"
        return f"{link}, {self.batch} images"


# Slow links get small models, so that a step takes seconds at most.
_MODELS = {
    10: ("smallcnn", "mlp"),
    100: ("smallcnn", "deep-mlp"),
    1000: ("deep-mlp", "resnet18"),
    10000: ("deep-mlp", "resnet18"),
}
# Fast and near links, where there is little to win: hosts, Mbit/s, microseconds. Not with a smaller
# model: its steps of 4 to 8 ms differ by half between two launches.
_NEAR = ((2, 1000, 50), (2, 10000, 50), (2, 10000, 10), (4, 1000, 50), (4, 10000, 50))
_NEAR_MODELS = ("smallcnn", "deep-mlp")
_NEAREST = ((2, 2000, 50), (2, 5000, 50), (2, 2000, 10), (2, 5000, 10))
# All of them with more images as well, so that steps mostly compute: a precision of 0.95 cannot be
# told from 0.94 with fewer than 20 set-ups where there is nothing to win.
_IMAGES = (64, 128)
GRID = (
    *(Setup(hosts, 1, mbit, _MODELS[mbit]) for hosts in (2, 4, 8) for mbit in _MODELS),
    *(Setup(16, 1, mbit, models[:1]) for mbit, models in _MODELS.items()),
    *(Setup(2, 2, mbit, ("deep-mlp",)) for mbit in (100, 1000)),
    *(Setup(hosts, 1, mbit, _NEAR_MODELS, delay) for hosts, mbit, delay in _NEAR),
    *(Setup(hosts, 1, mbit, _NEAR_MODELS[:1], delay) for hosts, mbit, delay in _NEAREST),
    *(
        Setup(hosts, 1, mbit, _NEAR_MODELS[:1], delay, images)
        for images in _IMAGES
        for hosts, mbit, delay in (*_NEAR, *_NEAREST)
    ),
)
QUICK = (Setup(2, 1, 100, ("smallcnn",)),)


def main() -> None:
    arguments = parse(sys.argv[1:])
    program.run(
        lambda: again(arguments.out) if arguments.again else grid(arguments),
        shaped=not arguments.again,
    )


def parse(words: list[str]) -> argparse.Namespace:
    parser = table_parser(__doc__, quick="a test run of a minute")
    add = parser.add_argument
    add("--again", action="store_true", help="predict again, without measuring")
    add("--hosts", type=int, nargs="+", metavar="N", help="only these numbers of hosts")
    add("--mbit", type=int, nargs="+", metavar="RATE", help="only these links")
    add("--models", nargs="+", help="only these models")
    add("--methods", nargs="+", metavar="METHOD", default=list(METHODS))
    add("--delay", type=int, nargs="+", metavar="US", help="only these latencies")
    add("--batch", type=int, nargs="+", metavar="N", help="only these images per rank and step")
    add("--seconds", type=float, default=1.5, help="time of each method and round [1.5]")
    add("--rounds", type=int, default=2, help="repetitions of all methods [2]")
    add("--least", type=int, default=3, help="fewest steps to measure [3]")
    add("--timeout", type=float, default=300.0, help="seconds without a result [300]")
    return parsed_by(parser, words, "benchmarks")


def chosen(arguments: argparse.Namespace) -> list[Setup]:
    """The set-ups that the arguments ask for."""
    kept = []
    for setup in QUICK if arguments.quick else GRID:
        models = tuple(m for m in setup.models if m in (arguments.models or setup.models))
        wanted = (
            (setup.hosts, arguments.hosts),
            (setup.mbit, arguments.mbit),
            (setup.delay_us, arguments.delay),
            (setup.batch, arguments.batch),
        )
        if models and all(value in (asked or [value]) for value, asked in wanted):
            kept.append(replace(setup, models=models))
    return kept


def grid(arguments: argparse.Namespace) -> list[str]:
    """Measure every set-up; return the ones that failed."""
    slices.shorten()
    table = Table(arguments.out / "predict.csv", PREDICTIONS)
    left = [(setup, pending(arguments, table, setup)) for setup in chosen(arguments)]
    left = [(setup, wanted) for setup, wanted in left if wanted]
    failures = []
    for number, (setup, wanted) in enumerate(left, 1):
        print(f"{setup}: link {number} of {len(left)}", flush=True)
        try:
            measure(arguments, table, setup, wanted)
        except LaunchError as error:
            print(f"error: {setup}: {error}", file=sys.stderr, flush=True)
            failures.append(str(setup))
    return failures


def pending(arguments: argparse.Namespace, table: Table, setup: Setup) -> Wanted:
    """The methods of each model that have no row yet."""
    wanted = []
    for model in setup.models:
        named = identity(setup, model)
        left = tuple(
            method
            for method in arguments.methods
            if not (arguments.resume and table.has(**named, method=method))
        )
        if left:
            wanted.append((model, left))
    return tuple(wanted)


def identity(setup: Setup, model: str) -> dict[str, Any]:
    """The columns that identify a group of methods."""
    names = ("hosts", "ranks", "mbit", "delay_us", "batch")
    return {**{name: getattr(setup, name) for name in names}, "model": model}


def measure(arguments: argparse.Namespace, table: Table, setup: Setup, wanted: Wanted) -> None:
    """Measure one link, and write a row for each method as soon as it is measured."""
    with (
        Hosts(setup.hosts, setup.mbit, setup.delay_us) as hosts,
        (arguments.out / "predict.jsonl").open("a") as raw,
    ):
        job = Job(
            task="prediction",
            model=wanted[0][0],
            models=wanted,
            batch=setup.batch,
            ranks=setup.ranks,
            world=setup.world,
            address=hosts.address(0),
            port=_PORT,
            interface=hosts.interface,
            counted=False,
            seconds=arguments.seconds,
            rounds=arguments.rounds,
            least=arguments.least,
            timeout=arguments.timeout,
        )
        prefixes = [hosts.inside(rank // setup.ranks) for rank in range(setup.world)]
        base = {**conditions(), "batch": setup.batch, "setup": asdict(setup)}
        known = Known()
        for result in results(job, prefixes):
            each = {**base, **result, "ranks": [rank["values"] for rank in result["ranks"]]}
            raw.write(json.dumps(each) + "\n")
            raw.flush()
            record(table, known.add(each))


def again(folder: Path) -> list[str]:
    """Write the rows again, from what their predictions were made from."""
    path = folder / "predict.jsonl"
    if not path.exists():
        sys.exit(f"error: there is no {path}: measure first, without --again")
    (folder / "predict.csv").unlink(missing_ok=True)
    table, known = Table(folder / "predict.csv", PREDICTIONS), Known()
    with path.open() as lines:
        for line in lines:
            record(table, known.add(json.loads(line)))
    return []


def record(table: Table, row: Mapping[str, Any] | None) -> None:
    """Write and print the row of a method, once there is one."""
    if row is None:
        return
    table.add(dict(row))
    link = f"{row['hosts']:2} x {row['ranks']} {row['mbit']:5} Mbit/s {row['delay_us']:3} us"
    times = f"measured {row['step_ms']:9.1f} ms, predicted {row['predicted_ms']:9.1f} ms"
    error = row["predicted_ms"] / row["step_ms"] - 1
    others = f"{row['other_cores']} cores busy"
    print(f"{link} {row['model']:8} {times} ({error:+6.1%}, {others})  {row['method']}", flush=True)


if __name__ == "__main__":
    main()
