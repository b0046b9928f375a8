"""Moments: points in the work of a rank."""

import time
from typing import NamedTuple

import torch


class Moment(NamedTuple):
    """A point in the work of a rank."""

    host: float  # seconds on the host's clock
    work: float  # seconds of work so far: of all threads of this process; on CUDA, `host`
    event: torch.cuda.Event | None = None  # on CUDA, a point in the work of the current stream


def now(device: torch.device) -> Moment:
    """Return the present moment. The host does not wait for the device."""
    host = time.perf_counter()
    if device.type != "cuda":
        return Moment(host, time.process_time())
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return Moment(host, host, event)


def seconds(first: Moment, last: Moment) -> float:
    """Return the seconds between two moments. On CUDA, the host waits for the last one."""
    if first.event is None or last.event is None:
        return last.host - first.host
    last.event.synchronize()
    milliseconds: float = first.event.elapsed_time(last.event)
    return milliseconds / 1000
