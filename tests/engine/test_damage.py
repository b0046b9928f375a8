"""Damaged messages: they raise on every rank, and the step is discarded."""

import pytest
import torch

from tests.engine import small
from tests.support.outcomes import caught, same
from torchcomp import Exchange, InProcessExchange, NonFiniteError, RankMismatchError, WireError
from torchcomp.engine import host

TOPK, SHARDED = "ef(topk(0.3))", 'ef(topk(0.3), exchange="sharded")'
BOTH = "bidirectional(topk(0.3), topk(0.3))"
EXACT = 'bidirectional(topk(0.3), topk(0.3), selection="exact")'
FRAMED = [("topk(0.3)", 1), (TOPK, 1), (SHARDED, 1), ('ef(quantize("int8"))', 1)]
FRAMED += [('mean(cast("bf16"), exchange="allgather")', 1)]
FRAMED += [(method, number) for method in (BOTH, EXACT) for number in (1, 2)]
"""Methods, and which frame of a sender is damaged: with two, it is that of the downlink."""


def damage(exchange, receiver, sender, change, number=1):
    """Apply `change` to one frame that `receiver` gets from `sender`: the `number`-th."""
    if exchange.rank != receiver:
        return
    seen, intact = [], exchange.check

    def check(frames, received, senders):
        # Either a row from each sender, or a frame from each in one row.
        sizes = frames.sizes * len(received)
        for origin, length, frame in zip(
            senders, frames.lengths * len(received), received.view(-1).split(sizes), strict=True
        ):
            if origin == sender and length:
                seen.append(length)
                if len(seen) == number:
                    change(frame, length)
        return intact(frames, received, senders)

    exchange.check = check


def another(byte):
    """Change a byte of the header."""

    def change(frame, length):
        frame[byte] += 1

    return change


ANOTHER_LAYOUT = another(9)


def flip(frame, length):
    frame[16 + length // 2] ^= 0x10


def no_frame(frame, length):
    frame[:2] = 0xFF


def last_bits(frame, length):
    frame[16 + length - 1] ^= 0xFF  # of the bits that mark the entries


def first_step(exchange, method=TOPK, *damages, **options):
    """Return the error of a first step in which frames are damaged."""
    for each in damages:
        damage(exchange, *each)
    averager = small.averager(exchange, method, **options)
    return caught(lambda: small.step(averager, small.gradients(0, exchange.rank)))


@pytest.mark.parametrize("receiver", [0, 2])
@pytest.mark.parametrize(("method", "number"), FRAMED)
def test_a_damaged_frame_raises_on_every_rank_and_changes_no_state(method, number, receiver):
    def body(exchange, damages):
        averager = small.averager(exchange, method, dtype=torch.float32, checksum=True)
        small.train(averager, 0, 2, torch.float32)
        error, before, calls = None, averager.state_dict(), []
        if damages:
            damage(exchange, receiver, 1, flip, number)
            averager.on_finish(calls.append)
            mine = small.gradients(2, exchange.rank, torch.float32)
            error = caught(lambda: small.step(averager, mine, may_skip=True))
            assert calls == []
            after = averager.state_dict()
            assert {key for key in before if not same(before[key], after[key])} == {"traffic"}
            if exchange.rank == receiver:
                del exchange.check
        return error, small.train(averager, 2, 4, torch.float32)

    damaged, intact = (small.on_ranks(3, lambda e, d=d: body(e, d)) for d in (True, False))
    for (error, later), (_, expected) in zip(damaged, intact, strict=True):
        assert type(error) is WireError
        assert "rank 1's" in str(error)
        assert not any(f"rank {rank}'s" in str(error) for rank in (0, 2))
        assert "step 3" in str(error)
        # With intact messages again, the run continues as if there had been no damage.
        assert same(later, expected)


FINDINGS = [(flip, True), (ANOTHER_LAYOUT, True), (ANOTHER_LAYOUT, False), (another(0), False)]
FINDINGS += [(another(2), False), (no_frame, False)]


@pytest.mark.parametrize(("change", "checksum"), FINDINGS)
@pytest.mark.parametrize("method", [TOPK, SHARDED])
def test_the_error_names_the_sender(method, change, checksum):
    body = lambda e: first_step(e, method, (0, 2, change), checksum=checksum)  # noqa: E731
    for error in small.on_ranks(3, body):
        assert type(error) is WireError
        assert "rank 2's" in str(error)


def test_a_damaged_frame_with_a_nan_is_reported_as_damaged():
    def body(exchange):
        damage(exchange, 0, 1, ANOTHER_LAYOUT)
        tensors = small.poisoned(0, exchange.rank)
        return type(caught(lambda: small.step(small.averager(exchange, TOPK), tensors)))

    assert small.on_ranks(2, body) == [WireError] * 2


INVALID = [(TOPK, 1), ('ef(topk(0.3, scope="tensor"))', 1), (SHARDED, 1), *FRAMED[-4:]]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("receiver", [0, 2])
@pytest.mark.parametrize(("method", "number"), INVALID)
def test_without_a_checksum_an_invalid_code_of_indices_stops_the_step(
    method, number, receiver, on_host, monkeypatch
):
    monkeypatch.setattr(host, "can_read", lambda x: on_host)

    def body(exchange):
        averager = small.averager(exchange, method)
        small.train(averager, 0, 2)
        before = averager.state_dict()
        damage(exchange, receiver, 1, last_bits, number)
        error = caught(lambda: small.step(averager, small.gradients(2, exchange.rank)))
        after = averager.state_dict()
        return type(error), {key for key in before if not same(before[key], after[key])}

    assert small.on_ranks(3, body) == [(NonFiniteError, {"traffic"})] * 3


def test_without_a_checksum_a_changed_value_is_not_found():
    """As docs/wire.md says: the transport checks the bytes."""
    change = lambda frame, length: frame[16:17].bitwise_xor_(1)  # noqa: E731
    assert small.on_ranks(2, lambda e: first_step(e, TOPK, (0, 1, change))) == [None] * 2


# --- Two levels -----------------------------------------------------------------------------------


def on_grid(body):
    """``body(rank, between)`` on a grid of 2 x 2 ranks: two rows, and two columns."""
    rows, columns = ([InProcessExchange.ranks(2) for _ in range(2)] for _ in range(2))
    results, all_ranks = [None] * 4, InProcessExchange.ranks(4)

    # Each rank is in three exchanges. They must share one lock of the rank that is computing, or
    # the ranks would deadlock.
    running = all_ranks[0]._board.running
    for line in (*rows, *columns):
        line[0]._board.running = running

    def run(exchange):
        row, column = divmod(exchange.rank, 2)
        _, between = Exchange.split(rows[row][column], columns[column][row])
        results[exchange.rank] = body(exchange.rank, between)

    small.on_ranks(4, run, all_ranks)
    return results


def a_damaged_frame(rank, odd, between):
    if rank == odd:
        damage(between, between.rank, 1 - between.rank, ANOTHER_LAYOUT)
    small.step(small.averager(between, TOPK), small.gradients(0, rank))


def a_nan(rank, odd, between):
    tensors = small.gradients(0, rank)
    if rank == odd:  # after the sum over the row, so that only one column has it
        tensors["bias"][0] = torch.nan
    small.step(small.averager(between, BOTH), tensors)


def another_value(rank, odd, between):
    between.build("a call", {}, lambda: (0, {"value": rank == odd}))


ODD = [(a_damaged_frame, WireError, "rank {0}'s"), (a_nan, NonFiniteError, "'bias'")]
ODD += [(another_value, RankMismatchError, "value: ")]


@pytest.mark.parametrize("odd", range(4))
@pytest.mark.parametrize(("call", "kind", "words"), ODD)
def test_what_is_odd_on_one_rank_raises_on_all_ranks_of_both_levels(call, kind, words, odd):
    for error in on_grid(lambda rank, between: caught(lambda: call(rank, odd, between))):
        assert type(error) is kind
        assert words.format(1 - odd // 2) in str(error)
