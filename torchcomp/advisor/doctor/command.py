"""Command: run an examination, print its report once, and return the exit status."""

import argparse
import json
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from torchcomp.advisor.doctor.examination import Results, measure
from torchcomp.advisor.doctor.job import Job, NotMeasured, join
from torchcomp.advisor.doctor.options import check_options
from torchcomp.advisor.doctor.report import as_dict, status, text
from torchcomp.errors import SpecError
from torchcomp.plan import wrapped


def examine(options: argparse.Namespace) -> int:
    """Examine the job that this process belongs to; see docs/doctor.md.

    Returns:
        The exit status, the same on all ranks but for one with an error of its own.

    Raises:
        SpecError: if an option is invalid.
    """
    check_options(options)
    check_output(options.json)
    results, job = Results(), None
    try:
        job = join(options.backend, options.timeout)
    except NotMeasured as error:
        _note(error, results)
    else:
        results.backend = job.backend
        try:
            measure(job, options, results)
        except Exception as error:
            _note(error, results)
    if _is_speaker(job, results):
        _print(results, options.json)
    if job is not None and not results.error:
        # torchrun ends the other ranks when one exits: rank 0 must have printed.
        with suppress(NotMeasured):
            job.barrier("printed")
    return status(results)


def check_output(path: str | None) -> None:
    """Require a file that rank 0 can write, before minutes are spent."""
    if path in (None, "-") or os.environ.get("RANK", "0") != "0":
        return
    file = Path(path).absolute()
    if not file.parent.is_dir():
        raise SpecError(f"--json {path}: there is no folder {file.parent}")
    if file.is_dir():
        raise SpecError(f"--json {path!r} is a folder: pass the name of a file, or -")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise SpecError(f"--json {path}: this user may not write there")


def _note(error: Exception, results: Results) -> None:
    """Keep an error with what was measured before it."""
    expected = isinstance(error, NotMeasured)
    results.error = str(error) if expected else f"{type(error).__name__}: {error}"
    # Of a script that failed, or of what was not foreseen, such as too little memory.
    cause = error.__cause__ if expected else error
    if cause is not None:
        sys.stderr.write("".join(traceback.format_exception(cause)))


def _is_speaker(job: Job | None, results: Results) -> bool:
    """Return whether this rank prints. After an error, that is the first one that has it."""
    if job is None:
        return True
    return job.is_first("report") if results.error else job.rank == 0


def _print(results: Results, path: str | None) -> None:
    if path != "-" and results.facts:
        print(f"\n{text(results)}", flush=True)
    if results.error:
        # In one piece, because other ranks write at the same time.
        sys.stderr.write(wrapped("", f"torchcomp: {results.error}") + "\n")
    if path is not None:
        _write(json.dumps(as_dict(results), indent=1), path)
    if status(results) and "TORCHELASTIC_RUN_ID" in os.environ:
        note = f"torchcomp: exit status {status(results)}, which torchrun reports below"
        print(note, file=sys.stderr, flush=True)


def _write(content: str, path: str) -> None:
    if path == "-":
        print(content, flush=True)
        return
    try:
        Path(path).write_text(f"{content}\n")
    except OSError as error:
        print(f"torchcomp: --json {path} was not written: {error}", file=sys.stderr, flush=True)
