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
    """Run one command and return the exit status: 0, or 2 for bad input."""
    options = _parser().parse_args(arguments)
    run = {"total_steps": options.total_steps, "warmup_steps": options.warmup_steps}
    average = {"compress": options.compress, "outer": options.outer}
    size = {"numel": options.numel, "world_size": options.world_size}
    lr = None
    try:
        # Without --total-steps no decay can be built, and explain() reports what is missing.
        if options.lr is not None and options.total_steps is not None:
            lr = decaying(options.decay, peak=options.lr, final=options.final_lr, **run)
        print(explain(options.spec, lr=lr, **size, **run, **average), flush=True)
    except (SpecError, ScheduleError) as error:
        # The caret lines follow the message, so it is printed as it is, without a traceback.
        print(f"torchcomp: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader closed the pipe early, as `head` does. Replace stdout: Python flushes it again
        # at exit, and would print a second BrokenPipeError.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchcomp", description="Data-parallel training with less network traffic."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    summary = "show the bytes sent and the state kept by a method or schedule"
    command = commands.add_parser("explain", help=summary, description=f"{summary}.".capitalize())
    command.add_argument(
        "spec", help='a method, "ef(topk(0.01))", or a schedule, "qsr(alpha=0.0175, h_base=4)"'
    )
    command.add_argument(
        "--numel",
        type=_count,
        required=True,
        metavar="N",
        help="parameters of the model, such as 25.6e6",
    )
    command.add_argument(
        "--world-size", type=_count, required=True, metavar="N", help="number of ranks"
    )
    run = command.add_argument_group("for schedules")
    run.add_argument(
        "--total-steps", type=_count, metavar="N", help="optimizer steps of the run (required)"
    )
    run.add_argument(
        "--warmup-steps", type=_count, default=0, metavar="N", help="steps of warm-up (default: 0)"
    )
    run.add_argument(
        "--compress",
        default="mean",
        metavar="METHOD",
        help="method that averages the parameters (default: mean)",
    )
    run.add_argument(
        "--outer", metavar="STEP", help="outer step after each average (default: none)"
    )
    decay = command.add_argument_group("for schedules that depend on the learning rate")
    decay.add_argument(
        "--lr", type=float, help="peak learning rate, at the end of warm-up (required)"
    )
    decay.add_argument(
        "--decay", default="cosine", choices=DECAYS, help="decay after warm-up (default: cosine)"
    )
    decay.add_argument(
        "--final-lr",
        type=float,
        default=1e-6,
        metavar="LR",
        help="learning rate at the end of the run (default: 1e-6)",
    )
    return parser


def _count(text: str) -> int:
    # int() would reject 25.6e6. float() accepts nan and inf, which is_integer() rejects.
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"expected an integer such as 8 or 25.6e6, not {text}")
    return int(number)


if __name__ == "__main__":
    raise SystemExit(main())
