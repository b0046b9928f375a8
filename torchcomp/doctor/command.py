"""Command: run an examination, print its report on rank 0, and return the exit status."""

import argparse
import json
import os
import sys
from pathlib import Path

from torchcomp.doctor.examination import Results, examined
from torchcomp.doctor.job import Job, NotMeasured, join
from torchcomp.doctor.options import check_options
from torchcomp.doctor.report import NOT_MEASURED, SCHEMA, as_dict, status, text
from torchcomp.errors import SpecError
from torchcomp.plan import wrapped


def examine(options: argparse.Namespace) -> int:
    """Examine the job that this process belongs to; see docs/doctor.md.

    Returns:
        The exit status, the same on all ranks.

    Raises:
        SpecError: if an option is invalid.
    """
    check_options(options)
    check_output(options.json)
    job: Job | None = None
    try:
        job = join(options.backend, options.timeout)
        results = examined(job, options)
        if job.rank == 0:
            _print(results, options.json)
        # torchrun ends the other ranks when one exits: rank 0 must have printed.
        job.barrier("printed")
    except NotMeasured as error:
        if job is None or error.speaker in (None, job.rank):
            _print_error(error, options.json)
        return NOT_MEASURED
    return status(results)


def check_output(path: str | None) -> None:
    """Require a folder that exists, before minutes are spent."""
    if path not in (None, "-") and not Path(path).absolute().parent.is_dir():
        raise SpecError(f"--json {path}: there is no folder {Path(path).absolute().parent}")


def _print(results: Results, path: str | None) -> None:
    if path is not None:
        _write(json.dumps(as_dict(results), indent=1), path)
    if path != "-":
        print(f"\n{text(results)}", flush=True)
    if status(results) and "TORCHELASTIC_RUN_ID" in os.environ:
        note = f"torchcomp: exit status {status(results)}, which torchrun reports below"
        print(note, file=sys.stderr, flush=True)


def _print_error(error: NotMeasured, path: str | None) -> None:
    if path is not None:
        _write(json.dumps({"schema": SCHEMA, "status": NOT_MEASURED, "error": str(error)}), path)
    # In one piece, because other ranks write at the same time.
    sys.stderr.write(wrapped("", f"torchcomp: {error}") + "\n")


def _write(content: str, path: str) -> None:
    if path == "-":
        print(content, flush=True)
    else:
        Path(path).write_text(f"{content}\n")
