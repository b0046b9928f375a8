"""Damaged messages: they raise on every rank, and the step is discarded."""

from functools import partial

import pytest
import torch

from tests.engine import small
from tests.support.outcomes import caught, same
from torchcomp import Exchange, InProcessExchange, NonFiniteError, RankMismatchError, WireError
from torchcomp.engine import host

FRAMED = [
    "topk(0.3)",
    "ef(topk(0.3))",
    'ef(topk(0.3), exchange="sharded")',
    'ef(quantize("int8"))',
    'mean(cast("bf16"), exchange="allgather")',
    "bidirectional(topk(0.3), topk(0.3))",
    'bidirectional(topk(0.3), topk(0.3), selection="exact")',
    "bidirectional(topk(0.3), identity)",
]


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


def flip(frame, length):
    frame[16 + length // 2] ^= 0x10


def another_version(frame, length):
    frame[0] += 1


def another_length(frame, length):
    frame[2] += 1


def another_layout(frame, length):
    frame[9] += 1


def no_frame(frame, length):
    frame[:2] = 0xFF


def noise(frame, length):
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(256, (frame.numel() - 16,), dtype=torch.uint8, generator=generator)
    frame[16:] = drawn


@pytest.mark.parametrize("receiver", [0, 2])
@pytest.mark.parametrize("method", FRAMED)
def test_a_damaged_frame_raises_on_every_rank_and_changes_no_state(method, receiver):
    def body(exchange):
        averager = small.averager(exchange, method, dtype=torch.float32, checksum=True)
        small.train(averager, 0, 2, torch.float32)
        before = averager.state_dict()
        damage(exchange, receiver, 1, flip)
        calls = []
        averager.on_finish(calls.append)
        mine = small.gradients(2, exchange.rank, torch.float32)
        error = caught(lambda: small.step(averager, mine, may_skip=True))
        assert calls == []
        after = averager.state_dict()
        changed = {key for key in before if not same(before[key], after[key])}
        if exchange.rank == receiver:
            del exchange.check
        return error, changed, small.train(averager, 2, 4, torch.float32)

    def undisturbed(exchange):
        averager = small.averager(exchange, method, dtype=torch.float32)
        small.train(averager, 0, 2, torch.float32)
        return small.train(averager, 2, 4, torch.float32)

    expected = small.on_ranks(3, undisturbed)
    for rank, (error, changed, later) in enumerate(small.on_ranks(3, body)):
        assert type(error) is WireError
        assert "rank 1's" in str(error)
        assert "rank 0's" not in str(error)
        assert "rank 2's" not in str(error)
        assert "step 3" in str(error)
        assert changed == {"traffic"}
        # With intact messages again, the run continues as if there had been no damage.
        assert same(later, expected[rank])


@pytest.mark.parametrize(
    ("change", "finding", "checksum"),
    [
        (flip, "checksum", True),
        (noise, "checksum", True),
        (another_layout, "checksum", True),
        (another_layout, "layout", False),
        *((another_version, "version", checksum) for checksum in (True, False)),
        *((another_length, "length", checksum) for checksum in (True, False)),
        *((no_frame, "does not begin", checksum) for checksum in (True, False)),
    ],
)
@pytest.mark.parametrize("method", ["ef(topk(0.3))", 'ef(topk(0.3), exchange="sharded")'])
def test_the_error_names_the_sender_and_the_finding(method, change, finding, checksum):
    def body(exchange):
        damage(exchange, 0, 2, change)
        averager = small.averager(exchange, method, checksum=checksum)
        return caught(lambda: small.step(averager, small.gradients(0, exchange.rank)))

    for error in small.on_ranks(3, body):
        assert type(error) is WireError
        assert "rank 2's" in str(error)
        assert finding in str(error)


def test_several_senders_are_all_named():
    def body(exchange):
        damage(exchange, 0, 2, flip)
        damage(exchange, 1, 0, another_version)
        averager = small.averager(exchange, "ef(topk(0.3))", checksum=True)
        return caught(lambda: small.step(averager, small.gradients(0, exchange.rank)))

    for error in small.on_ranks(3, body):
        assert "rank 2's" in str(error)
        assert "rank 0's" in str(error)
        assert "rank 1's" not in str(error)


@pytest.mark.parametrize("verb", ["_all_gather", "_all_to_all"])
@pytest.mark.parametrize("method", FRAMED)
def test_bytes_that_a_collective_changes_are_found(method, verb, monkeypatch):
    # Changes bytes of frames only. Small control messages have no checksum, so skip those.
    real, seen = getattr(InProcessExchange, verb), []

    def changed(self, *args):
        received = real(self, *args)
        if self.rank == 1 and received.dtype == torch.uint8 and received.numel() > 40:
            seen.append(verb)
            received = received.clone()
            received[20] ^= 1
        return received

    monkeypatch.setattr(InProcessExchange, verb, changed)

    def body(exchange):
        averager = small.averager(exchange, method, checksum=True)
        return caught(lambda: small.step(averager, small.gradients(0, exchange.rank)))

    errors = small.on_ranks(2, body)
    # A method that does not use this collective has no error.
    assert [type(error) for error in errors] == [WireError if seen else type(None)] * 2


def test_a_damaged_frame_with_a_nan_is_reported_as_damaged():
    def body(exchange):
        damage(exchange, 0, 1, another_layout)
        averager = small.averager(exchange, "ef(topk(0.3))")
        tensors = small.gradients(0, exchange.rank)
        tensors["bias"][0] = torch.nan
        return caught(lambda: small.step(averager, tensors))

    assert [type(error) for error in small.on_ranks(2, body)] == [WireError] * 2


INVALID = [
    ("ef(topk(0.3))", 1),
    ('ef(topk(0.3, scope="tensor"))', 1),
    ('ef(topk(0.3), exchange="sharded")', 1),
    ("bidirectional(topk(0.3), topk(0.3))", 1),
    ("bidirectional(topk(0.3), topk(0.3))", 2),
    ('bidirectional(topk(0.3), topk(0.3), selection="exact")', 1),
    ('bidirectional(topk(0.3), topk(0.3), selection="exact")', 2),
]
"""Methods, and which frame of a sender is damaged: with two, it is that of the downlink."""


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("receiver", [0, 2])
@pytest.mark.parametrize(("method", "number"), INVALID)
def test_without_a_checksum_an_invalid_code_of_indices_stops_the_step(
    method, number, receiver, on_host, monkeypatch
):
    monkeypatch.setattr(host, "can_read", lambda x: on_host)

    def spoil(frame, length):
        frame[16 + length - 1] ^= 0xFF  # of the bits that mark the entries

    def body(exchange):
        averager = small.averager(exchange, method)
        small.train(averager, 0, 2)
        before = averager.state_dict()
        damage(exchange, receiver, 1, spoil, number)
        error = caught(lambda: small.step(averager, small.gradients(2, exchange.rank)))
        after = averager.state_dict()
        return error, {key for key in before if not same(before[key], after[key])}

    for error, changed in small.on_ranks(3, body):
        assert type(error) is NonFiniteError
        assert changed == {"traffic"}


def test_without_a_checksum_a_changed_value_is_not_found():
    """As docs/wire.md says: the transport checks the bytes."""

    def body(exchange):
        damage(exchange, 0, 1, lambda frame, length: frame[16:17].bitwise_xor_(1))
        averager = small.averager(exchange, "ef(topk(0.3))")
        return small.step(averager, small.gradients(0, exchange.rank))[0]

    assert small.on_ranks(2, body) == [True] * 2


def test_ranks_with_and_without_checksums_are_refused():
    def body(exchange):
        averager = small.averager(exchange, "ef(topk(0.3))", checksum=exchange.rank == 1)
        return caught(averager.begin)

    for error in small.on_ranks(2, body):
        assert type(error) is RankMismatchError
        assert "checksum: False on rank 0, True on rank 1" in str(error)


# --- Two levels -----------------------------------------------------------------------------------


def on_grid(body):
    """``body(rank, inside, between)`` on a grid of 2 x 2 ranks: two rows, and two columns."""
    rows, columns = ([InProcessExchange.ranks(2) for _ in range(2)] for _ in range(2))
    results, all_ranks = [None] * 4, InProcessExchange.ranks(4)

    # Each rank is in three exchanges. They must share one lock of the rank that is computing, or
    # the ranks would deadlock.
    running = all_ranks[0]._board.running
    for line in (*rows, *columns):
        line[0]._board.running = running

    def run(exchange):
        row, column = divmod(exchange.rank, 2)
        inside, between = Exchange.split(rows[row][column], columns[column][row])
        results[exchange.rank] = body(exchange.rank, inside, between)

    small.on_ranks(4, run, all_ranks)
    return results


def take_step(rank, odd, inside, between, method="ef(topk(0.3))", frame=False):
    tensors = small.gradients(0, rank)
    if rank == odd and frame:
        damage(between, between.rank, 1 - between.rank, another_layout)
    elif rank == odd:
        # After the sum over the row, so that only one column has the NaN.
        tensors["bias"][0] = torch.nan
    averager = small.averager(between, method)
    small.step(averager, tensors)


ODD = {
    "nan": (take_step, NonFiniteError, "'bias'"),
    "nan both ways": (
        partial(take_step, method="bidirectional(topk(.3), topk(.3))"),
        NonFiniteError,
        "'bias'",
    ),
    "transparent": (partial(take_step, method="mean"), type(None), ""),
    "frame": (partial(take_step, frame=True), WireError, "rank {0}'s"),
    "build": (
        lambda rank, odd, inside, between: between.build(
            "a call", {}, lambda: (1 / (rank != odd), {"value": 1})
        ),
        RankMismatchError,
        "division by zero",
    ),
    "value": (
        lambda rank, odd, inside, between: between.build(
            "a call", {}, lambda: (0, {"value": rank == odd})
        ),
        RankMismatchError,
        "value: ",
    ),
}


@pytest.mark.parametrize("odd", range(4))
@pytest.mark.parametrize("what", ODD)
def test_what_is_odd_on_one_rank_raises_on_all_ranks_of_both_levels(what, odd):
    call, kind, words = ODD[what]
    for error in on_grid(lambda rank, *levels: caught(lambda: call(rank, odd, *levels))):
        assert type(error) is kind
        assert words.format(1 - odd // 2) in str(error)


def test_bytes_of_both_levels_are_counted_together_and_replicas_are_equal():
    def body(rank, inside, between):
        tensors = small.gradients(0, rank)
        for tensor in tensors.values():
            flat = tensor.flatten()
            inside.all_reduce(flat)
            tensor.copy_(flat.view(tensor.shape))
        averager = small.averager(between, "mean")
        _, means = small.step(averager, tensors)
        return means, averager.stats

    outcomes = on_grid(body)
    nbytes = 8 * (35 + 6 + 24 + 1)
    for means, stats in outcomes:
        assert same(means, outcomes[0][0])
        assert (stats.bytes_sent, stats.inside_bytes_sent) == (nbytes, nbytes)
