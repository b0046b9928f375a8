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
from functools import partial
from pathlib import Path

import torchcomp
from recipes.errors import RecipeError, exit_on_user_error
from recipes.experiments import ExperimentParser, ResultTable, fill_on_ranks
from recipes.result_files import make_folder
from recipes.rows import columns
from recipes.small_gpt.corpus import open_corpus
from recipes.small_gpt.pictures import tradeoff
from recipes.small_gpt.tables import TABLES
from recipes.small_gpt.training import BATCH, DENSE, LR, SHAPE, Outcome, split, train
from torchcomp.specs.checks import check_count, check_positive
from torchcomp.specs.spec import parse_aggregator, parse_outer_step

_HERE = Path(__file__).resolve().parent
RUN = ("method", "seed")
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
    path = arguments.out / "runs.csv"
    table = ResultTable(path, RUN, columns(Outcome), task(arguments), resume=arguments.resume)
    make_folder(arguments.out)
    runs = [(method, seed) for seed in arguments.seeds for method in arguments.methods]
    fill_on_ranks(
        arguments.ranks, table, runs, partial(train, steps=arguments.steps, lr=arguments.lr)
    )
    print(f"\n{TABLES['short_runs'](arguments.out)}\n")
    print("excess: validation loss above plain DDP's, by seed: mean and standard error")
    tradeoff(arguments.out, arguments.out / "tradeoff.png")
    print(f"tables and pictures are in {arguments.out}")


def parse(words: list[str]) -> argparse.Namespace:
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
    return (
        f"{arguments.ranks} ranks, {arguments.steps} steps, batch {BATCH} x {SHAPE.context}, "
        f"peak lr {arguments.lr:g}, {open_corpus().name}"
    )


if __name__ == "__main__":
    main()
