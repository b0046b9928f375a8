"""Command line: ``python -m torchcomp explain "ef(topk(0.01))" --numel 25.6e6 --world-size 8``."""

import argparse
import math
import sys
from collections.abc import Sequence

from torchcomp._version import __version__
from torchcomp.errors import SpecError
from torchcomp.explain import explain


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        print(
            explain(
                options.spec,
                numel=options.numel,
                world_size=options.world_size,
                total_steps=options.total_steps,
                compress=options.compress,
                outer=options.outer,
            )
        )
    except SpecError as error:
        print(f"torchcomp: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchcomp", description="Data-parallel training that is cheap on the network."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("explain", help="what a method sends, keeps and costs")
    command.add_argument("spec", help='the method, such as "ef(topk(0.01))"')
    command.add_argument(
        "--numel", type=_count, required=True, help="elements of the model, such as 25.6e6"
    )
    command.add_argument("--world-size", type=int, required=True, help="number of ranks")
    command.add_argument("--total-steps", type=int, help="for every(h): steps of the run")
    command.add_argument(
        "--compress", default="mean", metavar="METHOD", help="for every(h): how it averages [mean]"
    )
    command.add_argument("--outer", metavar="STEP", help="for every(h): its outer step [none]")
    return parser


def _count(text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number")
    return int(number)


if __name__ == "__main__":
    raise SystemExit(main())
