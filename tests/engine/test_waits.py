"""Waits and launches of the engine on a simulated device, and what its one message carries."""

from unittest import mock

import pytest
import torch

from tests.engine import small
from tests.support.launches import DEVICE, EchoExchange, counted, on_device
from tests.support.outcomes import caught
from torchcomp import Averager, InProcessExchange, NonFiniteError, WireError
from torchcomp.engine.state import Kind, Slot, State, Units
from torchcomp.routes.wire import Field, Frames

# --- Steps ----------------------------------------------------------------------------------------


CAST = 'ef(cast("fp16"))'
USED = {"used": ["bias", "conv"]}
WAITS = [
    # Waits in `begin`, `average` and `finish`, of a step after the third.
    ("mean", {}, [0, 0, 0]),
    ('mean(cast("fp16"))', {}, [0, 0, 1]),
    (CAST, {}, [0, 0, 1]),
    ("ef(topk(0.3))", {}, [0, 0, 1]),
    # The wait of `begin` is for a copy that was made at the end of the last step.
    (CAST, {"late": True}, [1, 0, 0]),
    # Flags of unused parameters cost no further wait, and the end of a flush only one.
    *((method, USED, [0, 0, 1]) for method in ("mean", CAST, "ef(topk(0.3))")),
    (CAST, {"flush": True}, [0, 0, 2]),
]


@pytest.mark.parametrize(("method", "options", "waits"), WAITS)
def test_waits_of_a_step(method, options, waits):
    with counted() as count:
        exchange, found = EchoExchange(2, count), []
        parameters = {name: on_device(p) for name, p in small.parameters().items()}
        late = options.get("late", False)
        averager = Averager(method, exchange, parameters, small.GROUPS, late=late)

        def step(number, **used):
            tensors = {name: on_device(g) for name, g in small.gradients(number, 0).items()}
            buckets = small.read(averager, tensors)
            count.reset()
            averager.begin()
            found[:] = [count.take().waits]
            for bucket in buckets:
                averager.average(bucket)
            found.append(count.take().waits)
            assert averager.finish(**used)
            found.append(count.waits)

        for number in range(3):  # the first step compares the ranks
            step(number)
        if "flush" in options:
            averager.use("mean")
        real = exchange.all_reduce_max
        with mock.patch.object(exchange, "all_reduce_max", wraps=real) as messages:
            step(3, **(options if options is USED else {}))
        assert found == waits, count
        assert not averager.state_dict()["flushing"]
    if options is USED:
        assert messages.call_count == 1
        assert averager.unused == ("matrix", "gain", "empty")


def test_norms_are_read_together():
    with counted() as count:
        parameters = {name: on_device(p) for name, p in small.parameters().items()}
        averager = Averager(CAST, EchoExchange(2, count), parameters, small.GROUPS)
        small.step(averager, parameters)
        norms = {name: float(part.norm()) for name, part in averager.state.items("error")}
        count.reset()
        assert averager.residual_norms() == norms
        assert len(norms) == 5
        # For all streams, because any thread can call this, and for all norms.
        assert count.waits == 2, count


def test_the_step_is_undone_for_parameters_that_no_rank_used():
    def body(exchange):
        averager = small.averager(exchange, "ef(topk(0.3))")
        small.train(averager, 0, 2)
        before = small.residual(averager)
        used = ["conv"] if exchange.rank else ["conv", "bias"]
        small.step(averager, small.gradients(2, exchange.rank), used=used)
        after = small.residual(averager)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        small.step(averager, small.gradients(3, exchange.rank))
        return changed, averager.unused

    assert small.on_ranks(2, body) == [({"bias", "conv"}, ())] * 2


def receive(exchange, sender, word=0, bits=0):
    """Let a rank receive a frame with other bits in a word of its header."""
    frames = Frames([(Field("values", torch.float64, 1),)], exchange.device)
    frame = frames.outgoing.clone()
    frame.view(torch.int64)[word : word + 1].bitwise_xor_(bits)
    exchange.check(frames, frame.view(1, -1), [sender])


@pytest.mark.parametrize(("odd", "error"), [("value", NonFiniteError), ("frame", WireError)])
def test_unused_parameters_are_known_where_the_step_fails(odd, error):
    def body(exchange):
        averager = small.averager(exchange, "ef(topk(0.3))")
        tensors = small.poisoned(0, exchange.rank, torch.nan if odd == "value" else 0.0)
        averager.begin()
        for bucket in small.read(averager, tensors):
            averager.average(bucket)
        if odd == "frame" and exchange.rank:
            receive(exchange, 0, 1, 7)
        used = ["conv", "bias"] if exchange.rank else ["bias", "gain"]
        return type(caught(lambda: averager.finish(used=used))), averager.unused

    assert small.on_ranks(2, body) == [(error, ("matrix", "empty"))] * 2


# --- The concluding message -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("findings", "words"),
    [
        ({1: (0, 0), 0: (0, 0)}, []),
        ({1: (1, 7), 0: (0, 0)}, ["rank 1's"]),
        ({1: (0, 256), 0: (1, -1)}, ["rank 1's", "rank 0's"]),
    ],
)
def test_findings_on_a_device_are_read_with_one_wait(findings, words):
    exchange = InProcessExchange.alone(DEVICE)
    exchange.global_ranks = (0, 1)
    with counted() as count:
        for sender, value in findings.items():
            receive(exchange, sender, *value)
        answer = exchange.max_at_end([True, False, True])
        assert answer == []
        count.reset()
        conclusion = exchange.conclude(on_device(torch.tensor(True)), "a test", "")
        assert count.waits == 0, count
        error = caught(conclusion.wait)
        assert words or count.waits == 1, count
        assert conclusion.flags.tolist() == [bool(words), 0, 1, 0, 1]
    assert answer == [True, False, True]
    assert not exchange.must_conclude
    assert type(error) is (WireError if words else type(None))
    assert all(word in str(error) for word in words)


def test_answers_are_those_of_any_rank_and_end_with_the_step():
    def body(exchange):
        first = exchange.max_at_end([exchange.rank == 1, False])
        second = exchange.max_at_end([exchange.rank == 0])
        assert exchange.conclude(None, "a test", "").wait()
        discarded = exchange.max_at_end([True])
        exchange.reset()
        assert exchange.conclude(None, "a test", "").wait()
        return first, second, discarded

    assert small.on_ranks(2, body) == [([True, False], [True], [])] * 2


def test_numbers_that_do_not_change_are_copied_to_the_device_once():
    exchange = InProcessExchange.alone(DEVICE)
    with counted() as count:
        copied = []
        for numbers in ([3, 1], [3, 1], [3, 2]):
            answer = exchange.max_at_end(numbers)
            same = exchange.same_at_end(b"\x07\xff")
            count.reset()
            assert exchange.conclude(on_device(torch.tensor(True)), "a test", "").wait()
            # One copy is that of the result.
            copied.append(
                sum(costs[0] for site, costs in count.by_site().items() if "copy" in site)
            )
            assert answer == numbers
            assert same()
    assert copied == [2, 1, 2]


@pytest.mark.parametrize("finite", [True, False, None])
def test_without_frames_and_flags_nothing_is_sent(finite):
    exchange = InProcessExchange.alone(DEVICE)
    with counted() as count, mock.patch.object(exchange, "all_reduce_max") as messages:
        mine = None if finite is None else on_device(torch.tensor(finite))
        assert exchange.conclude(mine, "a test", "").wait() is (finite is not False)
        assert count.waits == (finite is not None), count
    messages.assert_not_called()


# --- The state ------------------------------------------------------------------------------------


def slot(name, names, dtype=torch.float32, kind=Kind.DEBT):
    return Slot(name, kind, names, (3,) * len(names), dtype)


def test_a_change_of_the_loss_scale_takes_one_launch_for_each_dtype():
    state = State()
    with counted() as count:
        for dtype in (torch.float32, torch.float64):
            for number in range(3):
                names = tuple(f"{number} {part}" for part in "abc")
                state.open(slot(f"{dtype}", names, dtype), DEVICE)[1].fill_(1.0)
        state.open(slot("thresholds", ("a",), kind=Kind.CACHE), DEVICE)[1].fill_(1.0)
        state.commit()
        loose = {name: on_device(torch.ones(3)) for name in "ab"}
        state.load("momentum", Kind.ESTIMATE, False, loose)
        count.reset()
        Units().rescale(state, 0.5)
        assert (count.launches, count.waits) == (2, 0), count
        for name, factor in [("torch.float32", 0.5), ("momentum", 0.5), ("thresholds", 1.0)]:
            values = dict(state.items(name))
            assert values
            assert all(part.tolist() == [factor] * 3 for part in values.values())


def test_loaded_values_are_kept_until_the_stream_of_the_exchange_has_read_them():
    state = State()
    loaded = {"a": torch.ones(3), "b": torch.ones(3)}
    state.load("error", Kind.DEBT, False, dict(loaded))
    kept = []
    with (
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(torch.cuda, "current_stream", lambda device: f"side stream of {device}"),
        mock.patch.object(
            torch.Tensor, "record_stream", lambda self, stream: kept.append((self, stream))
        ),
    ):
        state.open(slot("error", ("a", "b")), torch.device("cpu"))
    assert [(id(values), stream) for values, stream in kept] == [
        (id(values), "side stream of cpu") for values in loaded.values()
    ]
