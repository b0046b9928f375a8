"""Commands that a test runs in another process."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


def run(
    command: Sequence[str | Path], *, cwd: Path = ROOT, check: bool = True, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command without a terminal and without the variables that an outer `make` exports."""
    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**clean, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if check and done.returncode:
        pytest.fail(f"{command} exited {done.returncode}:\n{done.stdout}{done.stderr}")
    return done
