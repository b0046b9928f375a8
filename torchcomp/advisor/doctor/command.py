"""Command: run an examination, print its report once, and return the exit status."""

import argparse
import json
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from torchcomp.advisor.costs import wrapped
from torchcomp.advisor.doctor.examination import Results, measure
from torchcomp.advisor.doctor.job import NotMeasured, join
from torchcomp.advisor.doctor.report import as_dict, status, text
from torchcomp.advisor.named_models import build_named
from torchcomp.specs.errors import SpecError


def examine(options: argparse.Namespace) -> int:
    """Examine the job that this process belongs to; see docs/doctor.md.

    Returns:
        The exit status, the same on all ranks but for one with an error of its own.

    Raises:
        SpecError: if an option is invalid.
    """
    _check(options)
    results, job = Results(), None
    try:
        job = join(options.backend, options.timeout)
        measure(job, options, results)
    except Exception as error:
        if job is None and isinstance(error, SpecError):
            raise
        expected = isinstance(error, NotMeasured)
        results.error = str(error) if expected else f"{type(error).__name__}: {error}"
        # Of a script that failed, or of what was not foreseen, such as too little memory.
        cause = error.__cause__ if expected else error
        if cause is not None:
            sys.stderr.write("".join(traceback.format_exception(cause)))
    # After an error, the first rank that has it prints.
    if job is None or (job.is_first("report") if results.error else job.rank == 0):
        _print(results, options.json)
    if job is not None and not results.error:
        # torchrun ends the other ranks when one exits: rank 0 must have printed.
        with suppress(NotMeasured):
            job.barrier("printed")
    return status(results)


def _check(options: argparse.Namespace) -> None:
    """Require what can be done, before minutes are spent."""
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
        name, *rest = options.script or [""]
        if not name or (name == "-m" and not rest):
            raise SpecError(
                "--script needs a file, or -m and a module, and takes the rest of the line"
            )
        if name != "-m" and not Path(name).is_file():
            raise SpecError(f"--script {name}: there is no such file in {Path.cwd()}")
    if options.model is not None:
        build_named(options.model)  # without memory
    if options.json not in (None, "-") and os.environ.get("RANK", "0") == "0":
        file = Path(options.json).absolute()
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise SpecError(
                f"--json {options.json!r} cannot be written: pass the name of a file in a folder "
                "that exists, or -"
            )


def _print(results: Results, path: str | None) -> None:
    if path != "-" and results.facts:
        print(f"\n{text(results)}", flush=True)
    if results.error:
        # In one piece, because other ranks write at the same time.
        sys.stderr.write(wrapped("", f"torchcomp: {results.error}") + "\n")
    if path == "-":
        print(json.dumps(as_dict(results), indent=1), flush=True)
    elif path is not None:
        Path(path).write_text(json.dumps(as_dict(results), indent=1) + "\n")
    if status(results) and "TORCHELASTIC_RUN_ID" in os.environ:
        note = f"torchcomp: exit status {status(results)}, which torchrun reports below"
        print(note, file=sys.stderr, flush=True)
