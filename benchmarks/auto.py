"""Let auto choose on hosts with shaped links, and compare its choice with each candidate alone.

    python -m benchmarks.auto                  # all links (10 minutes)
    python -m benchmarks.auto --quick          # two hosts, one link, one model

On each link, a model trains with register(model, "auto") until it has chosen. Then each of its
methods trains alone. Results are rows of auto.csv in the folder --out. --resume skips links that
have rows. benchmarks/report_auto.py writes the table of docs/auto.md. Needs root, iproute2 and gcc.
"""

import argparse
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.arguments import table_folder, table_parser
from benchmarks.net import program
from benchmarks.net.hosts import Hosts
from benchmarks.net.job import Job
from benchmarks.net.launch import results
from benchmarks.net.predicted import other_cores, step_times
from benchmarks.net.rows import AUTO, Table, conditions

_PORT = 29500
_DELAY_US = 500
GRID = (
    (2, 10, "smallcnn"),
    (2, 100, "smallcnn"),
    (2, 1000, "smallcnn"),
    (4, 10, "smallcnn"),
    (4, 1000, "deep-mlp"),
    (2, 1000, "resnet18"),
)
"""Hosts, Mbit/s and model."""

QUICK = ((2, 100, "smallcnn"),)


def main() -> None:
    parser = table_parser(__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a test run of a minute")
    add("--batch", type=int, default=16, help="images per rank and step [16]")
    add("--seconds", type=float, default=4.0, help="time to measure each method alone [4]")
    arguments = parser.parse_args()
    if arguments.out is None:
        arguments.out = table_folder(arguments.quick, "benchmarks")
    program.run(lambda: grid(arguments))


def grid(arguments: argparse.Namespace) -> list[str]:
    """Measure every link, and write a row for each method."""
    table = Table(arguments.out / "auto.csv", AUTO)
    for hosts, mbit, model in QUICK if arguments.quick else GRID:
        link = {"hosts": hosts, "mbit": mbit, "delay_us": _DELAY_US, "batch": arguments.batch}
        if arguments.resume and table.has(**link, model=model):
            continue
        with Hosts(hosts, mbit, _DELAY_US) as shaped:
            job = Job(
                task="auto",
                model=model,
                models=((model, ()),),
                batch=arguments.batch,
                world=hosts,
                address=shaped.address(0),
                port=_PORT,
                interface=shaped.interface,
                counted=False,
                seconds=arguments.seconds,
                timeout=600.0,
            )
            # Written together: --resume does not complete a link.
            rows = [
                row_of(result, link)
                for result in results(job, [shaped.inside(rank) for rank in range(hosts)])
            ]
        for row in rows:
            table.add(row)
            print(described(row), flush=True)
    return []


def row_of(result: Mapping[str, Any], link: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of one method."""
    ranks = [rank["values"] for rank in result["ranks"]]
    times = step_times(ranks)
    return {
        **conditions(),
        **link,
        **{name: result[name] for name in ("model", "parameters", "method")},
        "trial_ms": round(1000 * ranks[0]["trial"], 3),
        "steps": len(times),
        "step_ms": round(1000 * statistics.median(times), 3),
        "chosen": result["chosen"],
        "trial_steps": result["trial_steps"],
        "other_cores": other_cores(ranks),
    }


def described(row: Mapping[str, Any]) -> str:
    chosen = "  <- chosen" if row["method"] == row["chosen"] else ""
    link = f"{row['hosts']:2} hosts {row['mbit']:5} Mbit/s {row['model']:8}"
    times = f"trial {row['trial_ms']:8.1f} ms, alone {row['step_ms']:8.1f} ms"
    return f"{link} {times} ({row['other_cores']} cores busy)  {row['method']}{chosen}"


if __name__ == "__main__":
    main()
