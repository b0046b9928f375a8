"""Short time slices are inherited by the processes that a benchmark starts."""

import subprocess
import sys

import pytest

from tests.support.patience import PATIENCE

PROGRAM = """
import ctypes, os, struct, subprocess, sys
from benchmarks.net import slices

def read():
    libc = ctypes.CDLL(None)
    buffer = ctypes.create_string_buffer(48)
    assert libc.syscall(slices.SCHED_SETATTR[os.uname().machine] + 1, 0, buffer, 48, 0) == 0
    return struct.unpack(slices.ATTRIBUTES, buffer.raw)[5]

if "child" not in sys.argv:
    slices.shorten()
    print(read())
    subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[1], "child"], check=True)
else:
    print(read())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="time slices are set on Linux only")
def test_a_process_and_its_children_have_short_slices() -> None:
    command = [sys.executable, "-c", PROGRAM, PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    own, child = map(int, done.stdout.split())
    # Linux before 6.12 takes no slice from a process.
    assert own == child
    assert own in (0, 100_000)
