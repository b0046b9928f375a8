"""What holds for the whole suite, however it was started."""

import signal

# A shell starts background jobs with SIGINT ignored, and all their children inherit that: the tests
# that interrupt a process would wait for an interrupt that never comes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
