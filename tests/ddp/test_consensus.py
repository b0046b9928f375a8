"""What ranks compare before they start: all of them raise, and the error says what differs."""

import pytest

from tests.support.ranks import on_threads
from torchcomp import RankMismatchError
from torchcomp.exchange import ProcessGroupExchange


def test_ranks_that_compare_different_things_are_told_so() -> None:
    """One rank swaps the method while the others begin a step, for one."""

    def body() -> None:
        exchange = ProcessGroupExchange()
        what = "handle.swap" if exchange.rank == 1 else "the first step"
        told = "call: the first step on ranks 0, 2, handle.swap on rank 1"
        with pytest.raises(RankMismatchError, match=told):
            exchange.verify(what, {"step": 3})

    on_threads(3, body)
