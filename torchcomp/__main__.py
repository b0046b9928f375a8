"""Command line: ``python -m torchcomp explain "ef(topk(0.01))" --numel 25.6e6 --world-size 8``."""

import argparse
import math
import os
import sys
from collections.abc import Sequence

from torchcomp._version import __version__
from torchcomp.errors import ScheduleError, SpecError
from torchcomp.explain import explain
from torchcomp.learning_rates import DECAYS, decaying


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, 2 for bad input."""
    options = _parser().parse_args(arguments)
    run = {"total_steps": options.total_steps, "warmup_steps": options.warmup_steps}
    average = {"compress": options.compress, "outer": options.outer}
    size = {"numel": options.numel, "world_size": options.world_size}
    lr = None
    try:
        if options.lr is not None and options.total_steps is not None:
            lr = decaying(options.decay, peak=options.lr, final=options.final_lr, **run)
        print(explain(options.spec, lr=lr, **size, **run, **average), flush=True)
    except (SpecError, ScheduleError) as error:
        print(f"torchcomp: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever reads has seen enough, and Python must not flush again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchcomp", description="Data-parallel training that is cheap on the network."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("explain", help="what a method sends, keeps and costs")
    command.add_argument(
        "spec", help='a method, "ef(topk(0.01))", or a schedule, "qsr(alpha=0.0175, h_base=4)"'
    )
    command.add_argument(
        "--numel", type=_count, required=True, help="elements of the model, such as 25.6e6"
    )
    command.add_argument("--world-size", type=_count, required=True, help="number of ranks")
    run = command.add_argument_group("for a schedule: the run and its averages")
    run.add_argument("--total-steps", type=_count, help="optimizer steps of the run")
    run.add_argument("--warmup-steps", type=_count, default=0, help="steps of warm-up [0]")
    run.add_argument("--compress", default="mean", metavar="METHOD", help="how it averages [mean]")
    run.add_argument("--outer", metavar="STEP", help="outer step after each average [none]")
    rate = command.add_argument_group("for a schedule that reads the learning rate")
    rate.add_argument("--lr", type=float, help="peak, at the end of warm-up")
    rate.add_argument("--decay", default="cosine", choices=DECAYS, help="from the peak on [cosine]")
    rate.add_argument("--final-lr", type=float, default=1e-6, help="at the end of the run [1e-6]")
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
