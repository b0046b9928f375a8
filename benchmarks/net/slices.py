"""Short time slices for processes that share the cores of one machine.

A thread that waits for a core waits for up to a slice of another one, on Linux 2.8 ms and more. On
machines of their own, ranks do not wait for each other's slices. With short ones, a message of a
near link takes nearly the same time every time: without them, all-reduces of 64 bytes took 0.8 or
3.3 ms between two ranks on two cores, by chance.
"""

import ctypes
import os
import struct

from benchmarks.net.shell import ShellError

NANOSECONDS = 100_000
"""The shortest slice that Linux grants."""

SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
# Size, policy, flags, nice value, priority, slice, deadline, period: `struct sched_attr`.
ATTRIBUTES = "IIQiIQQQ"


def shorten() -> None:
    """Give this process, and those that it starts, short slices. Linux before 6.12 ignores it."""
    number = SCHED_SETATTR.get(os.uname().machine)
    if number is None:
        raise ShellError(f"cannot set time slices on {os.uname().machine}")
    size = struct.calcsize(ATTRIBUTES)
    attributes = struct.pack(ATTRIBUTES, size, os.SCHED_OTHER, 0, 0, 0, NANOSECONDS, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, 0, attributes, 0):
        raise ShellError(f"cannot set time slices: {os.strerror(ctypes.get_errno())}")
