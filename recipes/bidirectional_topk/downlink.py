"""Bytes of the downlink: those of a server's message, and those that ranks without a server get."""

import statistics
from dataclasses import dataclass

from recipes.bidirectional_topk.methods import METHODS
from recipes.bidirectional_topk.problems import Problem
from recipes.bidirectional_topk.runs import Run
from recipes.bidirectional_topk.serial import SerialWorkers
from recipes.bidirectional_topk.simulation import LoggedExchange, Workers
from recipes.bidirectional_topk.training import train
from torchcomp import explain

# The first step searches the threshold from no guess, so that it is not a usual one.
_STEPS = 3


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank receives in one step, counted by its exchange.

    Attributes:
        up: for its shard; mean over the ranks.
        down: as downlink messages; mean over the ranks.
        control: for counts and the threshold search; mean over the ranks.
        busiest: for its shard, on the rank that receives most.
    """

    up: float
    down: float
    control: float
    busiest: int


def count_traffic(run: Run, problem: Problem, serial: SerialWorkers) -> Traffic:
    """Take some steps more with one :class:`torchcomp.Averager` for each worker."""
    spec = METHODS[run.method].spec(run.ratio)
    workers = Workers(serial.model, spec, run.workers)
    workers.continue_from(serial)
    train(problem, workers, serial.model, lr=run.lr, steps=_STEPS, seed=run.seed)
    received = [phases(exchange) for exchange in workers.exchanges]
    up, down, control = (round(statistics.fmean(way), 1) for way in zip(*received, strict=True))
    return Traffic(up, down, control, busiest=max(up for up, _, _ in received))


def phases(exchange: LoggedExchange) -> tuple[int, int, int]:
    """Return the bytes a rank received for its shard, as downlink messages, and as control."""
    messages = [received.nbytes for received in exchange.log if received.payload]
    control = sum(received.nbytes for received in exchange.log if not received.payload)
    # Bidirectional TopK has two exchanges of messages; an all-gather has only the downlink.
    up, down = messages if len(messages) == 2 else (0, sum(messages))
    return up, down, control


def server_bytes(d: int, entries: int) -> int:
    """Return the size of a server's message: the entries, or all d values if those are smaller."""
    return min(explain(f"topk(k={entries})", numel=d, world_size=1).message_bytes, 4 * d)


def received_bytes(spec: str, d: int, workers: int) -> int:
    """Return the bytes that a rank receives per step, as planned by :func:`torchcomp.explain`."""
    return explain(spec, numel=d, world_size=workers).bytes_received


def random_union(d: int, k: int, workers: int) -> float:
    """Return the expected union of random supports of ``k`` of ``d`` entries, in units of k."""
    return d * (1 - (1 - k / d) ** workers) / k
