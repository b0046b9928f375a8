"""Wall-clock time of whole runs on hosts that are joined by links of 100 Mbit/s.

    python -m recipes.jointspar.wall_clock           # minutes; needs root, iproute2 and gcc
    python -m recipes.jointspar.wall_clock --mbit 1000

The runs of ``large_batch.py`` again, one seed each, every method at the rate that
``large_batch.csv`` chose for it, on network namespaces with shaped links (benchmarks/net). Writes
``wall_clock.csv`` and ``wall_clock.png``, with the accuracies of all seeds beside the times.
"""

import argparse
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.net.hosts import Hosts
from benchmarks.net.launch import LaunchError, lines_of
from benchmarks.net.shell import ShellError
from recipes.errors import told_in_one_line
from recipes.jointspar.drawing import draw_wall_clock
from recipes.jointspar.image_sets import FACTS, open_images
from recipes.jointspar.large_batch import RANKS, TABLE, WHOLE, batches_of, course_of, task_of
from recipes.jointspar.layer_training import Method, Outcome, train
from recipes.jointspar.networks import small_network
from recipes.jointspar.run_table import Summary, read_runs, summaries
from recipes.result_files import make_folder, write_csv
from torchcomp.checks import check_count

_HERE = Path(__file__).resolve().parent
_PORT = 29510
_SECONDS = 900
_DATASET, _NETWORK = "digits", "mlp"


@told_in_one_line()
def main() -> None:
    arguments = parse(sys.argv[1:])
    if arguments.rank is not None:
        work(arguments)
        return
    # SIGTERM ends like Ctrl-C: through every finally.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runs = read_runs(arguments.out / TABLE, task_of(_DATASET, _NETWORK, WHOLE))
    make_folder(arguments.out)
    rows = [row for row in summaries(runs) if shown(row)]
    try:
        outcomes = measure(arguments, rows)
    except (ShellError, LaunchError) as error:
        sys.exit(f"error: {error}")
    save(arguments, rows, outcomes)


def save(arguments: argparse.Namespace, rows: list[Summary], outcomes: list[Outcome]) -> None:
    """Show and write the table, and draw it."""
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
    parsed = parser.parse_args(words)
    check_count("--mbit", parsed.mbit)
    check_count("--delay-us", parsed.delay_us, 0)
    if parsed.steps is not None:
        check_count("--steps", parsed.steps)
    return parsed


def shown(row: Summary) -> bool:
    """All but the budgets of 75 and 90 %, which would save little."""
    return row.method.budget not in (0.75, 0.9)


def measure(arguments: argparse.Namespace, rows: list[Summary]) -> list[Outcome]:
    """Train every method of the rows on hosts of its own network."""
    plans = json.dumps([[asdict(row.method), row.rate] for row in rows])
    program = [sys.executable, "-m", "recipes.jointspar.wall_clock", "--plans", plans]
    if arguments.steps is not None:
        program += ["--steps", str(arguments.steps)]
    with Hosts(RANKS, arguments.mbit, arguments.delay_us) as hosts:
        commands = [
            [*hosts.inside(rank), *program, "--rank", str(rank), "--address", hosts.address(0)]
            for rank in range(RANKS)
        ]
        return [Outcome(**line) for line in lines_of(commands, hosts.interface, _SECONDS)]


def work(arguments: argparse.Namespace) -> None:
    """One rank of all runs; the first writes their outcomes, a line each."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{arguments.address}:{_PORT}",
        rank=int(arguments.rank),
        world_size=RANKS,
    )
    images = open_images(_DATASET, None)
    for method, rate in json.loads(arguments.plans):
        data = batches_of(images, WHOLE, seed=0)
        course = course_of(WHOLE, data.steps_per_epoch, rate, arguments.steps)
        torch.manual_seed(0)
        module = small_network(_NETWORK, FACTS[_DATASET])
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
