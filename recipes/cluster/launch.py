"""torchrun for jobs that a scheduler interrupts.

    python -m recipes.cluster.launch --nproc-per-node 8 -m recipes.train --config FILE

The flags are torchrun's. It differs from torchrun in two ways:

1. It passes SIGUSR1 and SIGTERM on to the ranks of this node, and waits until they have ended.
   SIGUSR1 would end torchrun at once, and after SIGTERM torchrun kills the ranks in 30 seconds.
2. If the ranks ask for a requeue, it exits with their code. torchrun exits with 1 after any error.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from recipes.interruption import REQUEUE, SIGNALS

# Codes of ranks after an interruption: a rank saved a checkpoint, or the signal arrived before the
# rank caught signals, so that nothing was lost.
_INTERRUPTED = {REQUEUE, *(-number for number in SIGNALS)}

# Those that torchrun handles itself. It would also take SIGTERM.
_TORCHRUN_SIGNALS = "SIGINT,SIGHUP,SIGQUIT"


def main(argv: list[str]) -> None:
    """Start the ranks of this node and wait for them.

    Args:
        argv: the flags of torchrun, the script, and the script's flags.
    """
    for number in SIGNALS:
        signal.signal(number, _pass_on)
    try:
        run.main(["--signals-to-handle", _TORCHRUN_SIGNALS, *argv])
    except ChildFailedError as error:
        if {failure.exitcode for failure in error.failures.values()} <= _INTERRUPTED:
            sys.exit(REQUEUE)
        raise


def _pass_on(number: int, frame: FrameType | None) -> None:
    ranks = _children()
    if not ranks:
        # No rank has started yet.
        sys.exit(REQUEUE)
    for pid in ranks:
        os.kill(pid, number)


def _children() -> list[int]:
    """Return the processes that this one has started and that have not ended."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in lists for pid in path.read_text().split()]


if __name__ == "__main__":
    main(sys.argv[1:])
