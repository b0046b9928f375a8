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
    """Bytes of messages that a rank receives in one step, counted by its exchange.

    Together, the first three are ``bytes_received`` of :class:`torchcomp.Stats`, which has the
    control messages apart.

    Attributes:
        up: entries for its shard; mean over the ranks.
        down: entries of the downlink; mean over the ranks.
        selection: counts, histograms and candidates of the selection; mean over the ranks.
        busiest: entries for its shard, on the rank that receives most.
    """

    up: float
    down: float
    selection: float
    busiest: int


def count_traffic(run: Run, problem: Problem, serial: SerialWorkers) -> Traffic:
    """Take some steps more with one :class:`torchcomp.Averager` for each worker."""
    spec = METHODS[run.method].spec(run.ratio)
    workers = Workers(serial.model, spec, run.workers)
    workers.continue_from(serial)
    train(problem, workers, serial.model, lr=run.lr, steps=_STEPS, seed=run.seed)
    received = [phases(exchange) for exchange in workers.exchanges]
    up, down, selection = (round(statistics.fmean(way), 1) for way in zip(*received, strict=True))
    return Traffic(up, down, selection, busiest=max(up for up, _, _ in received))


def phases(exchange: LoggedExchange) -> tuple[int, int, int]:
    """Return the bytes that a rank received up, down, and for the selection; see `Traffic`."""
    entries = [received.nbytes for received in exchange.log if received.entries]
    selection = sum(received.nbytes for received in exchange.log if not received.entries)
    # Bidirectional TopK exchanges entries twice; an all-gather has only the downlink.
    up, down = entries if len(entries) == 2 else (0, sum(entries))
    return up, down, selection


def server_bytes(d: int, entries: int) -> int:
    """Return the size of a server's message: the entries, or all d values if those are smaller."""
    return min(explain(f"topk(k={entries})", numel=d, world_size=1).message_bytes, 4 * d)


def received_bytes(spec: str, d: int, workers: int) -> int:
    """Return the bytes that a rank receives per step, as planned by :func:`torchcomp.explain`."""
    return explain(spec, numel=d, world_size=workers).bytes_received


def random_union(d: int, k: int, workers: int) -> float:
    """Return the expected union of random supports of ``k`` of ``d`` entries, in units of k."""
    return d * (1 - (1 - k / d) ** workers) / k
