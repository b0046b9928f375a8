"""Marks: points in the work of a device, and the time between two of them."""

import time

import torch

Mark = float | torch.cuda.Event
"""A time on the host's clock, or an event on a CUDA stream."""


def mark(device: torch.device) -> Mark:
    """Return a mark after all work that the current stream of the device has by now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(first: Mark, last: Mark) -> float:
    """Return the seconds between two marks. On CUDA, the host waits until `last` is reached."""
    if isinstance(first, float) or isinstance(last, float):
        return float(last) - float(first)  # type: ignore[arg-type]
    last.synchronize()
    milliseconds: float = first.elapsed_time(last)
    return milliseconds / 1000
