"""Command line: ``python -m torchcomp explain "ef(topk(0.01))" --numel 25.6e6 --world-size 8``.

``torchcomp plan`` predicts the hours of a whole run as well.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from torchcomp.advisor import Link, Prediction, Run, values_of
from torchcomp.advisor.catalogue import described, listed
from torchcomp.advisor.doctor import examine
from torchcomp.advisor.explain import MOST_RANKS, explain
from torchcomp.advisor.named_models import build_named
from torchcomp.advisor.prediction import BF16, DDP, USUAL, table
from torchcomp.advisor.units import number, whole, wrapped
from torchcomp.local_sgd.schedules import Schedule
from torchcomp.specs.errors import ScheduleError, SpecError
from torchcomp.specs.learning_rates import DECAYS, LRFunction, decaying
from torchcomp.specs.spec import parse
from torchcomp.specs.version import __version__

_EPILOG_OF_DOCTOR = """\
exit status: 0 healthy, 1 something was found, 2 bad options, 3 a link, a rank or the script failed.
Under torchrun, whose own status is always 1, it is in the JSON and in torchrun's report.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 2 for bad input, or one of doctor's."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except (SpecError, ScheduleError) as error:
        message, *spec_and_caret = f"torchcomp: {error}".split("\n")
        print("\n".join([wrapped("", message), *spec_and_caret]), file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader closed the pipe early, as `head` does. Replace stdout: Python flushes it again
        # at exit, and would print a second BrokenPipeError.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _methods(options: argparse.Namespace) -> int:
    print(listed() if options.name is None else described(options.name), flush=True)
    return 0


def _explain(options: argparse.Namespace) -> int:
    run = _given(options, "nodes", "total_steps", "warmup_steps", "compress", "outer")
    size: dict[str, Any] = {"numel": options.numel}
    if options.model is not None:
        size = {"model": build_named(options.model)}
    lr, ranks = _learning_rate(options), options.world_size
    print(explain(options.spec, world_size=ranks, lr=lr, **size, **run), flush=True)
    return 0


def _plan(options: argparse.Namespace) -> int:
    if (options.spec is None) == (not options.all):
        raise SpecError("plan needs either a method or --all, the usual ones")
    if options.currency is not None and options.price_per_gb is None:
        raise SpecError("--currency needs --price-per-gb, the price of a gigabyte")
    specs = USUAL if options.all else (options.spec,)
    built = [spec if spec in (DDP, BF16) else parse(spec) for spec in specs]
    lr = _learning_rate(options)
    if lr is not None and not any(isinstance(each, Schedule) for each in built):
        raise SpecError("--lr applies to schedules only, such as 'every(4)': leave it out")
    steps, step_time = options.total_steps, options.step_ms / 1e3
    warmup, speedup = options.warmup_steps or 0, options.speedup
    run = Run(options.world_size, steps, step_time, warmup_steps=warmup, lr=lr, speedup=speedup)
    link = Link(**_given(options, *(field.name for field in fields(Link))))
    model = None if options.model is None else build_named(options.model)
    values = values_of(model, options.numel)
    trainings = [Prediction(each, values, run).on(link) for each in built]
    price = {"price_per_gb": options.price_per_gb, "currency": options.currency or "USD"}
    print(table(trainings, run, link, **price), flush=True)
    return 0


def _given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: vars(options)[name] for name in names if vars(options)[name] is not None}


def _learning_rate(options: argparse.Namespace) -> LRFunction | None:
    shape = _given(options, "decay", "final_lr")
    if options.lr is None:
        if shape:
            raise SpecError("--decay and --final-lr need --lr, the rate at the end of warm-up")
        return None
    if options.total_steps is None:
        raise SpecError("--lr needs --total-steps, the steps of the run")
    steps, warmup = options.total_steps, options.warmup_steps or 0
    decay, final = shape.get("decay", DECAYS[0]), shape.get("final_lr", 1e-6)
    return decaying(decay, peak=options.lr, total_steps=steps, warmup_steps=warmup, final=final)


class _Parser(argparse.ArgumentParser):
    """Wraps its errors at 80 columns, like everything else that is printed."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, wrapped("", f"{self.prog}: error: {message}") + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchcomp", description="Data-parallel training with less network traffic."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, run, add_options, summary in (
        ("methods", _methods, _for_methods, "list the methods, schedules and outer steps"),
        ("explain", _explain, _for_explain, "show the bytes sent and the state of a method"),
        ("plan", _plan, _for_plan, "predict hours, bytes and price of a whole run on a network"),
        ("doctor", examine, _for_doctor, "measure the ranks of a job, their links and a step"),
    ):
        command = commands.add_parser(name, help=summary, description=f"{summary}.".capitalize())
        command.set_defaults(command=run)
        add_options(command)
    return parser


def _for_methods(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", nargs="?", help="show the options of this one, such as topk")


def _for_explain(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("spec", help='a method, "ef(topk(0.01))", or a schedule, "qsr(alpha=0.0175, h_base=4)"')
    _add_size(command)
    add = command.add_argument_group("for methods").add_argument
    add("--nodes", type=whole(1, MOST_RANKS), metavar="N", help="ranks that share a network card")
    add = command.add_argument_group("for schedules").add_argument
    add("--total-steps", type=whole(1), metavar="N", help="optimizer steps of the run (required)")
    add("--warmup-steps", type=whole(0), metavar="N", help="steps of warm-up (default: 0)")
    add("--compress", metavar="METHOD", help="method that averages the weights (default: mean)")
    add("--outer", metavar="STEP", help="outer step after each average (default: none)")
    _add_learning_rate(command)


def _for_plan(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    names = f'"{DDP}", "{BF16}" (DDP with that hook), a method or a schedule'
    add("spec", nargs="?", help=names)
    add("--all", action="store_true", help="compare the usual methods")
    _add_size(command)
    positive, at_least_0 = number("above 0"), number("of at least 0")
    add("--total-steps", type=whole(1), required=True, metavar="N", help="optimizer steps")
    add("--step-ms", type=positive, required=True, metavar="MS", help="time without any exchange")
    help_text = "how many times as fast the ranks encode as this machine (default: 1)"
    add("--speedup", type=positive, default=1.0, metavar="N", help=help_text)
    add("--price-per-gb", type=at_least_0, metavar="PRICE", help="of 10^9 bytes between nodes")
    add("--currency", metavar="NAME", help="of the price (default: USD)")
    add = command.add_argument_group("the network").add_argument
    add("--gbit", type=positive, required=True, help="Gbit/s of the network card of a node")
    add("--latency-us", type=at_least_0, metavar="US", help="from node to node (default: 30)")
    ranks = whole(1, MOST_RANKS)
    add("--ranks-per-node", type=ranks, metavar="N", help="ranks that share a card (default: 1)")
    add("--inside-gbit", type=positive, metavar="GBIT", help="inside a node (default: 1000)")
    add("--inside-latency-us", type=at_least_0, metavar="US", help="inside a node (default: 5)")
    add("--efficiency", type=positive, metavar="SHARE", help="of the bandwidth (default: 0.9)")
    add("--overhead-us", type=at_least_0, metavar="US", help="of each collective (default: 20)")
    add("--backend", choices=("nccl", "gloo"), help="(default: nccl)")
    add = command.add_argument_group("for schedules").add_argument
    add("--warmup-steps", type=whole(0), metavar="N", help="steps of warm-up (default: 0)")
    _add_learning_rate(command)


def _for_doctor(command: argparse.ArgumentParser) -> None:
    command.epilog = _EPILOG_OF_DOCTOR
    add = command.add_argument
    seconds = number("above 0")
    help_text = "how long one answer of another rank may take (default: 15)"
    add("--timeout", type=seconds, default=15.0, metavar="SECONDS", help=help_text)
    add("--backend", choices=("gloo", "nccl"), help="(default: nccl where there are GPUs)")
    add("--json", metavar="FILE", help="write results as JSON to it, or - for stdout, not a report")
    group = command.add_argument_group("a training step", "one of --model, --numel and --script")
    add = group.add_argument
    add("--model", metavar="NAME", help="torchvision/resnet50, timm/vit_base_patch16_224, ...")
    add("--batch", type=whole(1), metavar="N", help="images per rank, for --model (default: 8)")
    add("--numel", type=whole(1), metavar="N", help="parameters of a model that only waits")
    add("--step-ms", type=seconds, metavar="MS", help="compute time of its step, as measured")
    help_text = "about how long to take steps; the collectives get half of it (default: 20)"
    add("--seconds", type=seconds, default=20.0, help=help_text)
    help_text = "run some steps of a script, FILE or -m MODULE, with its arguments; the last option"
    add("--script", nargs=argparse.REMAINDER, metavar="...", help=help_text)


def _add_size(command: argparse.ArgumentParser) -> None:
    add = command.add_mutually_exclusive_group(required=True).add_argument
    add("--numel", type=whole(0), metavar="N", help="parameters of the model, such as 25.6e6")
    add("--model", metavar="NAME", help="torchvision/resnet50, timm/vit_base_patch16_224, ...")
    ranks, add = whole(1, MOST_RANKS), command.add_argument
    add("--world-size", type=ranks, required=True, metavar="N", help="number of ranks")


def _add_learning_rate(command: argparse.ArgumentParser) -> None:
    title = "for schedules that depend on the learning rate"
    add = command.add_argument_group(title).add_argument
    add("--lr", type=number("above 0"), help="peak learning rate, at the end of warm-up (required)")
    add("--decay", choices=DECAYS, help="decay after warm-up (default: cosine)")
    add("--final-lr", type=number("of at least 0"), metavar="LR", help="at the end (default: 1e-6)")
