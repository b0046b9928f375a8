"""InProcessExchange: ranks that are threads of one process, for simulations and tests."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchcomp.exchange.base import Exchange

Result = TypeVar("Result")

_TIMEOUT_SECONDS = 300
"""How long a rank waits for the others; only a hang takes as long."""


class _Board:
    """Where the ranks hand each other values: everyone brings one and takes all.

    Attributes:
        floor: who works holds it. A hundred threads that all want Python's interpreter lock, and
            hand it over at every small operation, take several times as long.
    """

    def __init__(self, size: int) -> None:
        self.floor = threading.Lock()
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_SECONDS)
        # Two rows in turn, so that one barrier for each call is enough: nobody can be two ahead.
        self._rows: list[list[Any]] = [[None] * size, [None] * size]

    def share(self, call: int, rank: int, value: Any) -> list[Any]:
        """Every rank's value in rank order; `call` counts this rank's calls."""
        row = self._rows[call % 2]
        row[rank] = value
        self.floor.release()
        try:
            self.barrier.wait()
        finally:
            self.floor.acquire()
        return list(row)


class InProcessExchange(Exchange):
    """One rank of several in one process; see :func:`run_in_process`.

    Bytes are counted as over a process group.
    """

    def __init__(self, board: _Board, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size, torch.device("cpu"))
        self._board = board
        self._calls = 0

    @classmethod
    def ranks(cls, world_size: int) -> "list[InProcessExchange]":
        """The exchanges of `world_size` ranks, in rank order, for :func:`run_in_process`."""
        board = _Board(world_size)
        return [cls(board, rank, world_size) for rank in range(world_size)]

    def gather_objects(self, value: Any) -> list[Any]:
        self._calls += 1
        return self._board.share(self._calls, self.rank, value)

    def _all_reduce(self, values: Tensor) -> None:
        first, *others = self.gather_objects(values.clone())
        total = first.clone()
        for other in others:
            total += other
        values.copy_(total)

    def _all_gather(self, mine: Tensor) -> Tensor:
        return torch.cat(self.gather_objects(mine.clone()))

    def _all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        everyone = self.gather_objects(torch.split(outgoing.clone(), list(sizes)))
        mine = [parts[self.rank] for parts in everyone]
        if [part.numel() for part in mine] != list(arriving):
            raise ValueError(f"rank {self.rank} expected parts of {list(arriving)} elements")
        return torch.cat(mine)


def run_in_process(
    world_size: int,
    body: Callable[[Any], Result],
    exchanges: "Sequence[InProcessExchange] | None" = None,
) -> list[Result]:
    """Run ``body(exchange)`` on every rank, each in a thread of this process.

    Args:
        world_size: number of ranks.
        body: gets the rank's :class:`InProcessExchange`.
        exchanges: those of an earlier call, to go on with; by default new ones.

    Returns:
        What `body` returned, in rank order.

    Raises:
        Exception: what `body` raised on the first rank where it did.
    """
    ranks = exchanges or InProcessExchange.ranks(world_size)
    board = ranks[0]._board

    def work(exchange: InProcessExchange) -> Result:
        try:
            with board.floor:
                return body(exchange)
        except BaseException:
            board.barrier.abort()  # wakes the ranks that wait for this one
            raise

    with ThreadPoolExecutor(max_workers=world_size) as pool:
        jobs = [pool.submit(work, exchange) for exchange in ranks]
        wait(jobs)
    errors = [error for job in jobs if (error := job.exception()) is not None]
    # A rank that waited for the one that failed has a broken barrier, which explains nothing.
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [job.result() for job in jobs]
