"""How a program that measures on shaped hosts ends."""

import signal
import sys
from collections.abc import Callable, Sequence

from benchmarks.net.launch import LaunchError
from benchmarks.net.rows import TableError
from benchmarks.net.shell import ShellError, missing


def run(measure: Callable[[], Sequence[str]], *, shaped: bool = True) -> None:
    """Measure, and exit with a message if that fails.

    Args:
        measure: returns the names of what has failed.
        shaped: whether it needs hosts with shaped links.
    """
    # End on SIGTERM as on Ctrl-C: an exception runs every `finally`, which removes the hosts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if shaped and missing():
        sys.exit(f"error: {missing()}")
    try:
        failures = measure()
    except (ShellError, TableError, LaunchError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if failures:
        sys.exit("failed: " + "; ".join(failures))
