"""torchrun for jobs that a scheduler interrupts. Needs torch 2.10.

    python -m recipes.cluster.launch --nproc-per-node 8 -m recipes.train --config FILE

The flags are torchrun's. There are four differences:

1. SIGUSR1 goes to the ranks of this node. It ends torchrun, unless told otherwise.
2. So does SIGTERM, and the ranks have as long as they need. After SIGTERM, torchrun kills them in
   30 seconds, or in another time that ``--shutdown-timeout`` of newer versions sets.
3. If the ranks ask for a requeue, it exits with their code. torchrun exits with 1 after any error
   and after any signal that it handles, so its two flags would not be enough here.
4. ``--max-restarts`` must be 0, because torchrun would restart ranks that a signal has ended.

The script must catch SIGUSR1 and SIGTERM, as ``recipes.train`` does. If a rank dies of one of them,
the launcher assumes that it had not begun to train, so that nothing was lost, and exits with 75.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from recipes.signals import REQUEUE, SIGNALS

# Codes of ranks after an interruption: a rank saved a checkpoint, or the signal arrived before the
# rank caught signals.
_INTERRUPTED = {REQUEUE, *(-number for number in SIGNALS)}

# Those that torchrun handles itself. It would also take SIGTERM.
_TORCHRUN_SIGNALS = "SIGINT,SIGHUP,SIGQUIT"


def main(argv: list[str]) -> None:
    """Start the ranks of this node and wait for them."""
    _catch_signals()
    # torch takes seconds to import. A signal must not end this process before.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from recipes.interruption import ignore_signals

    _check(argv)
    try:
        run.main(["--signals-to-handle", _TORCHRUN_SIGNALS, *argv])
    except ChildFailedError as error:
        if {failure.exitcode for failure in error.failures.values()} <= _INTERRUPTED:
            sys.exit(REQUEUE)
        raise
    finally:
        # While Python ends, it restores the default of the signals that it has caught. A further
        # signal would then end this process with another code.
        ignore_signals()


def _check(argv: list[str]) -> None:
    """Exit with a message if torch is too old, or if torchrun would restart interrupted ranks."""
    import torch
    from torch.distributed import run

    flags = run.parse_args(argv)
    if not hasattr(flags, "signals_to_handle"):
        sys.exit(f"error: this launcher needs torch 2.10 or later, found {torch.__version__}")
    # It can also come from the variable PET_MAX_RESTARTS.
    if flags.max_restarts:
        sys.exit(
            f"error: --max-restarts must be 0 here, found {flags.max_restarts}: torchrun would "
            "restart ranks that a signal has ended. Let the scheduler restart the job, or use "
            "torchrun"
        )


def _catch_signals() -> None:
    """Pass signals on from a thread: Python runs no handler while torch waits for other nodes."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in SIGNALS:
        # The number goes to the pipe before this is called.
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_pass_on, args=(reader,), daemon=True).start()


def _pass_on(pipe: int) -> None:
    started = False
    while True:
        number = os.read(pipe, 1)[0]
        if number in SIGNALS:
            ranks = _children()
            started |= bool(ranks)
            if not started:
                os._exit(REQUEUE)
            for pid in ranks:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)


def _children() -> list[int]:
    found = list[int]()
    for path in Path("/proc/self/task").glob("*/children"):
        # A thread can end in between. Another one then has its children.
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
