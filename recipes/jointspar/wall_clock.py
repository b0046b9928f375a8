"""Wall-clock time of whole runs on hosts that are joined by links of 100 Mbit/s.

    python -m recipes.jointspar.wall_clock
    python -m recipes.jointspar.wall_clock --mbit 1000 --out FOLDER

Takes minutes, and needs root, iproute2 and gcc. It repeats the runs of ``large_batch.py`` with one
seed, each method at the learning rate selected in the ``large_batch.csv`` of the same folder. The
hosts are network namespaces with shaped links (benchmarks/net). ``wall_clock.csv`` has the times,
and ``wall_clock.png`` shows them with the accuracies of all seeds.
"""

import argparse
import json
import signal
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist

from benchmarks.net.hosts import Hosts
from benchmarks.net.launch import LaunchError, lines_of
from benchmarks.net.shell import ShellError
from recipes.errors import exit_on_user_error
from recipes.experiments import ResultTable
from recipes.jointspar.drawing import draw_wall_clock
from recipes.jointspar.image_sets import SIZES, open_images
from recipes.jointspar.large_batch import QUICK, RANKS, WHOLE, batches_of, task_of
from recipes.jointspar.layer_training import Outcome, paper_schedule, train
from recipes.jointspar.methods import parse_method
from recipes.jointspar.networks import small_network
from recipes.jointspar.parts import part_parser
from recipes.jointspar.run_table import Summary, contender_of, read_runs, summaries
from recipes.result_files import make_folder
from torchcomp.checks import check_count

_MBIT, _DELAY_US = 100, 500
_PORT = 29510
_TIMEOUT = 900
_DATASET, _NETWORK = "digits", "mlp"
COLUMNS = (
    *("method", "optimizer", "lr", "mbit", "delay_us", "ranks", "bytes_share"),
    *("step_ms", "backward_ms", "seconds"),
)


@exit_on_user_error()
def main() -> None:
    """Measure the missing methods, print the table, and draw the picture."""
    arguments = parse(sys.argv[1:])
    if arguments.rank is not None:
        work(arguments)
        return
    # Turn SIGTERM into an exception, so that every finally block removes its hosts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    table = open_table(arguments)
    rows = large_batch_rows(arguments)
    make_folder(arguments.out)
    finished = {contender_of(row) for row in table.rows}
    try:
        measure(arguments, [row for row in rows if row.contender not in finished], table)
    except (ShellError, LaunchError) as error:
        sys.exit(f"error: {error}")
    # Without the columns that name the run: every row has the same, and they are long.
    for line in [COLUMNS, *([row[name] for name in COLUMNS] for row in table.rows)]:
        print("  ".join(f"{cell!s:>14}" for cell in line))
    draw_wall_clock(table.path, rows, arguments.out / "wall_clock.png")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = part_parser(__doc__)
    parser.add_argument("--mbit", type=int, default=_MBIT, help=f"of every link [{_MBIT}]")
    parser.add_argument(
        "--delay-us", type=int, default=_DELAY_US, help=f"one-way delay [{_DELAY_US}]"
    )
    parser.add_argument("--steps", type=int, help="steps of a run [as in large_batch.py]")
    # Flags of the ranks, which the main process starts on the hosts.
    for name in ("rank", "address", "runs"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parsed = parser.read(words)
    check_count("--mbit", parsed.mbit)
    check_count("--delay-us", parsed.delay_us, 0)
    if parsed.steps is not None:
        check_count("--steps", parsed.steps)
    published = (parsed.mbit, parsed.delay_us, parsed.steps) == (_MBIT, _DELAY_US, None)
    parsed.out = parser.output_folder(parsed, published=published)
    parsed.size = QUICK if parsed.quick else WHOLE
    return parsed


def open_table(arguments: argparse.Namespace) -> ResultTable:
    """Open the table, with the finished methods if the experiment is resumed."""
    task = task_of(_DATASET, _NETWORK, arguments.size)
    if arguments.steps is not None:
        task += f", {arguments.steps} steps"
    task += f", {arguments.mbit} Mbit/s, {arguments.delay_us} us"
    return ResultTable(arguments.out / "wall_clock.csv", COLUMNS, task, resume=arguments.resume)


def large_batch_rows(arguments: argparse.Namespace) -> list[Summary]:
    """Return the methods to measure, with the results of ``large_batch.py``.

    Raises:
        RecipeError: If ``--out`` has no table of ``large_batch.py``.
    """
    runs = read_runs(arguments.out, task_of(_DATASET, _NETWORK, arguments.size))
    return [row for row in summaries(runs) if shown(row)]


def shown(row: Summary) -> bool:
    """Return whether a method is measured: budgets of 75 and 90 % would save little time."""
    return row.contender.method.budget not in (0.75, 0.9)


def measure(arguments: argparse.Namespace, rows: list[Summary], table: ResultTable) -> None:
    """Train every method on one host per rank, and add its times to the table."""
    if not rows:
        return
    runs = json.dumps([_words(row) for row in rows])
    program = [sys.executable, "-m", "recipes.jointspar.wall_clock", "--runs", runs]
    if arguments.quick:
        program.append("--quick")
    if arguments.steps is not None:
        program += ["--steps", str(arguments.steps)]
    with Hosts(RANKS, arguments.mbit, arguments.delay_us) as hosts:
        commands = [
            [*hosts.inside(rank), *program, "--rank", str(rank), "--address", hosts.address(0)]
            for rank in range(RANKS)
        ]
        lines = lines_of(commands, hosts.interface, _TIMEOUT)
        for row, line in zip(rows, lines, strict=True):
            table.add(cells_of(arguments, row, Outcome(**line)))


def work(arguments: argparse.Namespace) -> None:
    """Train all runs as one rank. Rank 0 prints their outcomes, one line each."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{arguments.address}:{_PORT}",
        rank=int(arguments.rank),
        world_size=RANKS,
    )
    images = open_images(_DATASET, None)
    size = arguments.size
    for method, optimizer, lr in json.loads(arguments.runs):
        data = batches_of(images, size, seed=0)
        steps = arguments.steps or size.epochs * data.steps_per_epoch
        hyperparameters = paper_schedule(steps, lr, optimizer)
        # The same seed on all ranks gives the same weights.
        torch.manual_seed(0)
        module = small_network(_NETWORK, SIZES[_DATASET])
        outcome = train(module, data, parse_method(method), hyperparameters, seed=0)
        if arguments.rank == "0":
            print(json.dumps(asdict(outcome)), flush=True)
    # Rank 0 hosts the store, so it must not exit while another rank still uses it.
    dist.barrier()
    dist.destroy_process_group()


def cells_of(arguments: argparse.Namespace, row: Summary, outcome: Outcome) -> list[object]:
    """Return a row of the table."""
    return [
        *(*_words(row), arguments.mbit, arguments.delay_us, RANKS, f"{outcome.bytes_share:.4f}"),
        *(f"{outcome.step_ms:.2f}", f"{outcome.backward_ms:.2f}", f"{outcome.seconds:.2f}"),
    ]


def _words(row: Summary) -> tuple[str, str, float]:
    """The contender and its learning rate, as cells and for the command line of the ranks."""
    return str(row.contender.method), row.contender.optimizer, row.lr


if __name__ == "__main__":
    main()
