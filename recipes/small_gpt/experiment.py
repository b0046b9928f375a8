"""What compression costs a small GPT, trained by AdamW for few steps.

    python -m recipes.small_gpt.experiment               # 200 steps, 2 ranks, 5 seeds
    python -m recipes.small_gpt.experiment --quick
    python -m recipes.small_gpt.experiment --resume
    python -m recipes.small_gpt.experiment --methods dense 'every(8) with compress=quantize("int8")'

Ranks are processes over gloo. The files in ``--out`` are ``runs.csv`` (every run, saved as it
ends) and ``tradeoff.png``.
"""

import argparse
import sys
import time
from pathlib import Path

import torch.distributed as dist

import torchcomp
from recipes.errors import RecipeError, exit_on_user_error
from recipes.experiments import ExperimentParser, ResultTable
from recipes.local_ranks import run_on_ranks
from recipes.result_files import make_folder
from recipes.small_gpt.corpus import open_corpus
from recipes.small_gpt.pictures import draw_tradeoff
from recipes.small_gpt.summary import Summary, summaries
from recipes.small_gpt.training import BATCH, DENSE, LR, SHAPE, Run, split, train
from torchcomp.checks import check_count, check_positive
from torchcomp.spec import parse_aggregator, parse_outer_step

_HERE = Path(__file__).resolve().parent
COLUMNS = ("method", "seed", "loss", "bytes", "dense_bytes")
RANKS, STEPS = 2, 200
QUICK_STEPS = 10
METHODS = (
    DENSE,
    'every(3) with compress=ef(quantize("int4"))',
    'every(4) with compress=ef(quantize("int4"))',
    "ef(topk(0.01))",
    "ef(warmup(topk(0.01), steps=20))",
    'ef(warmup(topk(0.02, values="int4"), steps=20))',
    'ef(quantize("int8"))',
    'bidirectional(quantize("int4"), quantize("int4"))',
    'every(2) with compress=ef(topk(0.1, values="int8"))',
    'every(4) with compress=ef(topk(0.1, values="int8"))',
    'every(8) with compress=quantize("int8")',
    "ef(topk(0.1))",
    "powersgd(rank=1)",
)


@exit_on_user_error()
def main() -> None:
    """Train with every method and seed, and compare loss and traffic."""
    arguments = parse(sys.argv[1:])
    started = time.monotonic()
    path = arguments.out / "runs.csv"
    table = ResultTable(path, COLUMNS, task(arguments), resume=arguments.resume)
    make_folder(arguments.out)
    runs = missing(arguments, table)
    if runs:
        table.rows = run_on_ranks(arguments.ranks, on_this_rank, runs, table)[0]
    compared = summaries(table.rows)
    print(f"\n{text_table(compared)}\n")
    title = f"A small GPT, AdamW, {arguments.steps} steps, {arguments.ranks} ranks"
    draw_tradeoff(compared, title, arguments.out / "tradeoff.png")
    print(f"tables and pictures are in {arguments.out}")
    print(f"total time: {time.monotonic() - started:.0f} s")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = ExperimentParser(__doc__.splitlines()[0], _HERE, quick_seeds=(0,))
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(METHODS),
        help='"dense", spec strings, schedules, and "every(8) with compress=..., outer=..."',
    )
    parser.add_argument("--steps", type=int, help=f"of every run [{STEPS}; quick: {QUICK_STEPS}]")
    parser.add_argument("--ranks", type=int, default=RANKS, help=f"processes [{RANKS}]")
    parser.add_argument("--lr", type=float, default=LR, help=f"peak learning rate [{LR:g}]")
    parsed = parser.read(words)
    if parsed.steps is None:
        parsed.steps = QUICK_STEPS if parsed.quick else STEPS
    for name in ("steps", "ranks"):
        check_count(f"--{name}", getattr(parsed, name))
    check_positive("--lr", parsed.lr)
    if BATCH % parsed.ranks:
        raise RecipeError(f"--ranks {parsed.ranks}: expected a divisor of the batch of {BATCH}")
    # All losses are compared with that of plain DDP. A method that is named twice runs once.
    parsed.methods = list(dict.fromkeys([DENSE, *parsed.methods]))
    for method in parsed.methods[1:]:
        check_method(method)
    same = parsed.methods == list(METHODS) and parsed.steps == STEPS
    parsed.out = parser.output_folder(
        parsed, published=same and (parsed.ranks, parsed.lr) == (RANKS, LR)
    )
    return parsed


def check_method(method: str) -> None:
    """Raise SpecError unless the strings of a method can be built."""
    spec, options = split(method)
    torchcomp.parse(spec)
    if "compress" in options:
        parse_aggregator(options["compress"])
    if "outer" in options:
        parse_outer_step(options["outer"])


def task(arguments: argparse.Namespace) -> str:
    """Return the settings that all rows of a table share."""
    return (
        f"{arguments.ranks} ranks, {arguments.steps} steps, batch {BATCH} x {SHAPE.context}, "
        f"peak lr {arguments.lr:g}, {open_corpus().name}"
    )


def missing(arguments: argparse.Namespace, table: ResultTable) -> list[Run]:
    """Return the runs that the table lacks, seed by seed."""
    finished = {(row["method"], int(row["seed"])) for row in table.rows}
    return [
        Run(method, arguments.steps, seed, arguments.lr)
        for seed in arguments.seeds
        for method in arguments.methods
        if (method, seed) not in finished
    ]


def on_this_rank(runs: list[Run], table: ResultTable) -> list[dict[str, str]]:
    """Train as one rank of the default group. Rank 0 prints and saves."""
    for run in runs:
        started = time.monotonic()
        outcome = train(run)
        if dist.get_rank() == 0:
            cells = (f"{outcome.loss:.4f}", outcome.nbytes, outcome.dense_bytes)
            table.add((run.method, run.seed, *cells))
            seconds = time.monotonic() - started
            # The parent's output is often a pipe, where lines would otherwise wait in the buffer.
            print(f"seed {run.seed}, {outcome.loss:.4f}, {seconds:.0f} s: {run.method}", flush=True)
    return table.rows


def text_table(compared: list[Summary]) -> str:
    """Return the comparison as text."""
    lines = [f"{'loss':>6}{'excess, %':>18}{'traffic':>13}  method"]
    for each in compared:
        excess = each.excess.with_error(1)
        lines.append(f"{each.loss.mean:>6.3f}{excess:>18}{each.saving:>7.1f}x less  {each.method}")
    lines.append("excess: validation loss above plain DDP's, by seed: mean and standard error")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
