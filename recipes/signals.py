"""The signals of a scheduler, and the exit code that answers them. Importing this is fast."""

import os
import signal

# "Temporary failure, try again" in sysexits.h. Errors of the user exit with 1, those of a command
# line often with 2, and what a signal killed with 128 and more.
REQUEUE = os.EX_TEMPFAIL

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
