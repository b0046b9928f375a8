"""Clock: the time that work takes, also where the ranks of a host share its cores."""

import time

import torch


def worked(device: torch.device) -> float:
    """Return the seconds that this thread has worked, or the time at which the device is idle.

    On the CPU, the time on the clock would show the work of the other ranks of the host.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.thread_time()
