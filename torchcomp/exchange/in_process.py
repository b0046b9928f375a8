"""InProcessExchange: ranks that are threads of one process, for simulations and tests."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchcomp.exchange.base import Exchange

Result = TypeVar("Result")

_TIMEOUT_SECONDS = 300  # for which a rank waits for the others; only a hang takes as long


class _Board:
    """Shared memory: each rank writes one value per call and reads those of all."""

    def __init__(self, size: int) -> None:
        # Only one rank computes at a time: many threads that compete for Python's interpreter lock
        # take several times as long.
        self.running = threading.Lock()
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_SECONDS)
        # Used alternately. A rank is at most one call ahead of another, so it never overwrites a
        # row that another one still reads.
        self._rows: list[list[Any]] = [[None] * size, [None] * size]

    def share(self, call: int, rank: int, value: Any) -> list[Any]:
        row = self._rows[call % 2]
        row[rank] = value
        self.running.release()
        try:
            self.barrier.wait()
        finally:
            self.running.acquire()
        return list(row)


class InProcessExchange(Exchange):
    """The exchange of one rank that is a thread of this process; see :func:`run_in_process`."""

    def __init__(self, board: _Board, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size, torch.device("cpu"))
        self._board, self._calls = board, 0

    @classmethod
    def alone(cls, device: torch.device) -> "InProcessExchange":
        """Return the exchange of a single rank, whose thread is already running."""
        exchange = cls(_Board(1), 0, 1)
        exchange.device = device
        exchange._board.running.acquire()
        return exchange

    @classmethod
    def ranks(cls, world_size: int) -> "list[InProcessExchange]":
        """Return the exchanges of `world_size` ranks, in rank order."""
        board = _Board(world_size)
        return [cls(board, rank, world_size) for rank in range(world_size)]

    def gather_objects(self, value: Any, dst: int | None = None) -> list[Any]:
        self._calls += 1
        values = self._board.share(self._calls, self.rank, value)
        return values if dst in (None, self.rank) else []

    def _all_reduce(self, values: Tensor) -> None:
        # Send a copy: another rank might still read `values` when this one overwrites it.
        first, *others = self.gather_objects(values.clone())
        # Every rank adds in rank order, so all get the same bits.
        total = first.clone()
        for other in others:
            total += other
        values.copy_(total)

    def _all_gather(self, mine: Tensor) -> Tensor:
        return torch.cat(self.gather_objects(mine.clone()))

    def _all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        by_sender = self.gather_objects(torch.split(outgoing.clone(), list(sizes)))
        mine = [parts[self.rank] for parts in by_sender]
        # Threads could exchange any sizes. A process group requires a match.
        if [part.numel() for part in mine] != list(arriving):
            raise ValueError("the `sizes` of the senders do not match `arriving`")
        return torch.cat(mine)


def run_in_process(
    world_size: int,
    body: Callable[[Any], Result],
    exchanges: "Sequence[InProcessExchange] | None" = None,
) -> list[Result]:
    """Run ``body(exchange)`` on every rank, each in a thread of this process.

    `exchanges` are used again, with their counters; by default, there are new ones.

    Returns:
        The results of `body`, in rank order. An exception is that of the lowest rank that raised.
    """
    ranks = exchanges or InProcessExchange.ranks(world_size)
    board = ranks[0]._board

    def work(exchange: InProcessExchange) -> Result:
        try:
            with board.running:
                return body(exchange)
        except BaseException:
            board.barrier.abort()  # wake the ranks that wait for this one, or they would time out
            raise

    with ThreadPoolExecutor(max_workers=world_size) as pool:
        jobs = [pool.submit(work, exchange) for exchange in ranks]
        wait(jobs)
    errors = [error for job in jobs if (error := job.exception()) is not None]
    # Raise the cause first: ranks that waited for the failed one only report a broken barrier.
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [job.result() for job in jobs]
