"""Wall-clock time of whole runs on hosts that are joined by links of 100 Mbit/s.

    python recipes/jointspar/wall_clock.py           # minutes; needs root, iproute2 and gcc
    python recipes/jointspar/wall_clock.py --mbit 1000

The runs of ``large_batch.py`` again, one seed each, every method at the rate that
``large_batch.csv`` chose for it, on network namespaces with shaped links (benchmarks/net). Writes
``wall_clock.csv`` and ``wall_clock.png``, with the accuracies of all seeds beside the times.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

# Before any process group: see torchcomp/ddp/__init__.py.
import torch._dynamo
import torch.distributed as dist
from drawing import draw_wall_clock
from image_sets import FACTS, open_images
from large_batch import RANKS, WHOLE, batches_of, course_of
from layer_training import Method, Outcome, train
from networks import small_network
from run_table import Summary, read_csv, summaries

# The recipes are scripts: they import their neighbours as modules beside them.
sys.path.append(str(Path(__file__).resolve().parents[1] / "bidirectional_topk"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from net.hosts import Hosts
from net.shell import ShellError
from result_files import write_csv

_HERE = Path(__file__).resolve().parent
_PORT = 29510
_SECONDS = 900
# One thread a rank; idle threads that spin would take the core from another rank.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def main() -> None:
    arguments = parse(sys.argv[1:])
    if arguments.rank is not None:
        work(arguments)
        return
    rows = [row for row in summaries(read_csv(arguments.out / "large_batch.csv")) if shown(row)]
    try:
        outcomes = measure(arguments, rows)
    except ShellError as error:
        sys.exit(f"error: {error}")
    header = ["kind", "budget", "norm", "rate", "mbit", "delay_us", "ranks", "accuracy"]
    header += ["deviation", "bytes_share", "step_ms", "backward_ms", "seconds"]
    cells = [cells_of(arguments, row, o) for row, o in zip(rows, outcomes, strict=True)]
    for line in [header, *cells]:
        print("  ".join(f"{cell!s:>14}" for cell in line))
    write_csv(arguments.out / "wall_clock.csv", header, cells)
    draw_wall_clock(arguments.out / "wall_clock.csv", arguments.out / "wall_clock.png")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--mbit", type=int, default=100, help="rate of every link [100]")
    parser.add_argument("--delay-us", type=int, default=500, help="one way [500]")
    parser.add_argument("--steps", type=int, help="of a run [all of large_batch.py's]")
    folder = _HERE / "results"
    parser.add_argument("--out", type=Path, default=folder, help="folder of the files [results]")
    for name in ("rank", "address", "plans"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def shown(row: Summary) -> bool:
    """All but the budgets of 75 and 90 %, which would save little."""
    return row.method.budget not in (0.75, 0.9)


def measure(arguments: argparse.Namespace, rows: list[Summary]) -> list[Outcome]:
    """Train every method of the rows on hosts of its own network."""
    plans = json.dumps([[asdict(row.method), row.rate] for row in rows])
    with Hosts(RANKS, arguments.mbit, arguments.delay_us) as hosts:
        workers = []
        for rank in range(RANKS):
            command = [sys.executable, __file__, "--rank", str(rank), "--plans", plans]
            command += ["--address", hosts.address(0)]
            if arguments.steps is not None:
                command += ["--steps", str(arguments.steps)]
            workers.append(
                subprocess.Popen(
                    [*hosts.inside(rank), *command],
                    env={**os.environ, **_ENVIRONMENT, "GLOO_SOCKET_IFNAME": hosts.interface},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            outputs = [worker.communicate(timeout=_SECONDS)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    if any(worker.returncode for worker in workers):
        raise ShellError("a rank failed: its own message is above")
    return [Outcome(**json.loads(line)) for line in outputs[0].splitlines()]


def work(arguments: argparse.Namespace) -> None:
    """One rank of all runs; the first writes their outcomes, a line each."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{arguments.address}:{_PORT}",
        rank=int(arguments.rank),
        world_size=RANKS,
    )
    images = open_images("digits", None)
    for method, rate in json.loads(arguments.plans):
        data = batches_of(images, WHOLE, seed=0)
        course = course_of(WHOLE, data.steps_per_epoch, rate, arguments.steps)
        torch.manual_seed(0)
        module = small_network("mlp", FACTS["digits"])
        outcome = train(module, data, Method(**method), course, seed=0)
        if arguments.rank == "0":
            print(json.dumps(asdict(outcome)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def cells_of(arguments: argparse.Namespace, row: Summary, outcome: Outcome) -> list[object]:
    """A line of the table."""
    method = row.method
    return [
        *(method.kind, method.budget, method.norm, row.rate, arguments.mbit, arguments.delay_us),
        *(RANKS, f"{row.mean:.3f}", f"{row.deviation:.3f}", f"{outcome.bytes_share:.4f}"),
        *(f"{outcome.step_ms:.2f}", f"{outcome.backward_ms:.2f}", f"{outcome.seconds:.2f}"),
    ]


if __name__ == "__main__":
    main()
