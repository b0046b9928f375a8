"""Run system commands. A command that fails raises an error with its own message."""

import os
import shutil
import subprocess

# Each program with the Debian package that contains it.
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "ss": "iproute2", "gcc": "gcc"}


class ShellError(RuntimeError):
    """A command failed, or this machine lacks what the shaped network needs."""


def run(*command: str, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ShellError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def missing() -> str:
    """A sentence about what this machine lacks for shaped hosts; empty if nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root: use sudo or a privileged container"
    packages = sorted({PROGRAMS[name] for name in PROGRAMS if shutil.which(name) is None})
    if packages:
        return f"shaped hosts need {' and '.join(packages)}: apt-get install {' '.join(packages)}"
    return ""
