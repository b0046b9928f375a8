"""Options of the command line, and the check of those that depend on each other."""

import argparse

from torchcomp.advisor.doctor.workloads import check_script
from torchcomp.advisor.named_models import build_named
from torchcomp.errors import SpecError
from torchcomp.flags import number, whole

_EPILOG = """\
exit status: 0 healthy, 1 something was found, 2 bad options, 3 a link, a rank or the script failed.
Under torchrun, whose own status is always 1, it is in the JSON and in torchrun's report.
"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of doctor to its parser."""
    command.epilog = _EPILOG
    add = command.add_argument
    seconds = number("above 0")
    help_text = "how long one answer of another rank may take (default: 15)"
    add("--timeout", type=seconds, default=15.0, metavar="SECONDS", help=help_text)
    help_text = "gloo or nccl (default: nccl where there are GPUs)"
    add("--backend", choices=("gloo", "nccl"), help=help_text)
    help_text = "write all results as JSON to this file, or - for stdout in place of the report"
    add("--json", metavar="FILE", help=help_text)
    group = command.add_argument_group("a training step", "one of --model, --numel and --script")
    add = group.add_argument
    add("--model", metavar="NAME", help="torchvision/resnet50, timm/vit_base_patch16_224, ...")
    add("--batch", type=whole(1), metavar="N", help="images per rank, for --model (default: 8)")
    add("--numel", type=whole(1), metavar="N", help="parameters of a model that only waits")
    help_text = "compute time of its step, as you measured it"
    add("--step-ms", type=seconds, metavar="MS", help=help_text)
    help_text = "about how long to take steps; the collectives get half of it (default: 20)"
    add("--seconds", type=seconds, default=20.0, help=help_text)
    help_text = (
        "run your own script for some steps: FILE or -m MODULE, and its arguments; the last "
        "option. What it trains is thrown away"
    )
    add("--script", nargs=argparse.REMAINDER, metavar="...", help=help_text)


def check_options(options: argparse.Namespace) -> None:
    """Require options that go together, and a model that can be built.

    Raises:
        SpecError: otherwise.
    """
    given = [name for name in ("model", "numel", "script") if getattr(options, name) is not None]
    if len(given) > 1:
        raise SpecError(f"--{given[0]} and --{given[1]} exclude each other: pass one of them")
    if options.batch is not None and options.model is None:
        raise SpecError("--batch is for --model")
    if options.numel is not None and options.step_ms is None:
        raise SpecError("--numel needs --step-ms, the compute time of a step without an exchange")
    if options.step_ms is not None and options.numel is None:
        raise SpecError("--step-ms is for --numel: the other steps are measured")
    if options.script is not None:
        check_script(options.script)
    if options.model is not None:
        build_named(options.model)  # before minutes are spent; without memory
