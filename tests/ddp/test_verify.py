"""Verification across ranks: all ranks raise, and the error lists the values that differ."""

import pytest

from tests.support.ranks import on_threads
from torchcomp import RankMismatchError
from torchcomp.exchange import ProcessGroupExchange


def test_error_of_ranks_in_different_calls_names_the_calls() -> None:
    """For example, one rank swaps the method while the others begin a step."""

    def body() -> None:
        exchange = ProcessGroupExchange()
        what = "handle.swap" if exchange.rank == 1 else "the first step"
        message = "call: the first step on ranks 0, 2, handle.swap on rank 1"
        with pytest.raises(RankMismatchError, match=message):
            exchange.verify(what, {"step": 3})

    on_threads(3, body)
