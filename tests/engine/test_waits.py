"""The device forms of the engine: what makes the host wait, and what is launched.

Run on the CPU, where a wait shows as a value that the host reads from a tensor.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine import small
from tests.support.outcomes import caught
from torchcomp import InProcessExchange, NonFiniteError, WireError, host, wire
from torchcomp.state import Kind, Slot, State

READS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


@contextmanager
def reads() -> Iterator[list[str]]:
    """List the methods through which the host reads values, while device forms run."""
    found: list[str] = []
    with mock.patch.object(host, "can_read", return_value=False):
        patches = [_noting(name, found) for name in READS]
        for patch in patches:
            patch.start()
        try:
            yield found
        finally:
            for patch in patches:
                patch.stop()


def _noting(name, found):
    original = getattr(torch.Tensor, name)

    def noting(self, *args, **kwargs):
        found.append(name)
        return original(self, *args, **kwargs)

    return mock.patch.object(torch.Tensor, name, noting)


class Launches(TorchDispatchMode):
    """Count the operators that run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


# --- Steps ----------------------------------------------------------------------------------------

UNFRAMED = {"mean": 0, 'mean(cast("fp16"))': 1, 'ef(cast("fp16"))': 1}
"""Waits of a step, for methods whose messages are summed on the way."""


@pytest.mark.parametrize("method", UNFRAMED)
def test_waits_of_a_step(method):
    def body(exchange):
        averager = small.averager(exchange, method)
        small.train(averager, 0, 2)  # the first step compares the ranks
        tensors = small.gradients(2, exchange.rank)
        with reads() as found:
            small.step(averager, tensors)
        return len(found)

    # One rank: with several, each would count the reads of all.
    assert small.on_ranks(1, body) == [UNFRAMED[method]]


@pytest.mark.parametrize("method", UNFRAMED)
def test_flags_of_unused_parameters_cost_no_further_wait_or_message(method):
    def body(exchange):
        averager = small.averager(exchange, method)
        small.train(averager, 0, 2)
        tensors = small.gradients(2, exchange.rank)
        with (
            reads() as found,
            mock.patch.object(exchange, "any_of", wraps=exchange.any_of) as messages,
        ):
            small.step(averager, tensors, used=["bias", "conv"])
        return len(found), messages.call_count, averager.unused

    assert small.on_ranks(1, body) == [(1, 1, ("matrix", "gain", "empty"))]


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


def receive(exchange, sender, finding):
    """Let a rank receive a frame with this finding."""
    with mock.patch.object(wire, "inspect", return_value=finding):
        exchange.receive([sender], [torch.zeros(wire.framed(8), dtype=torch.uint8)], [8])


@pytest.mark.parametrize(("odd", "error"), [("value", NonFiniteError), ("frame", WireError)])
def test_unused_parameters_are_known_where_the_step_fails(odd, error):
    def body(exchange):
        averager = small.averager(exchange, "ef(topk(0.3))")
        tensors = small.gradients(0, exchange.rank)
        if odd == "value":
            tensors["bias"][0] = torch.nan
        averager.begin()
        for bucket in small.read(averager, tensors):
            averager.average(bucket)
        if odd == "frame" and exchange.rank:
            receive(exchange, 0, [wire.DAMAGED])
        used = ["conv", "bias"] if exchange.rank else ["bias", "gain"]
        return type(caught(lambda: averager.finish(used=used))), averager.unused

    assert small.on_ranks(2, body) == [(error, ("matrix", "empty"))] * 2


def test_norms_are_read_together():
    def body(exchange):
        averager = small.averager(exchange, "ef(topk(0.3))")
        small.train(averager, 0, 2)
        norms = {name: float(part.norm()) for name, part in averager.state.items("error")}
        with reads() as found:
            assert averager.residual_norms() == norms
        return len(norms), len(found)

    assert small.on_ranks(1, body) == [(5, 1)]


def test_the_end_of_a_flush_is_read_once_for_all_parameters():
    def body(exchange):
        averager = small.averager(exchange, "ef(topk(0.3))")
        small.train(averager, 0, 2)
        averager.use("mean")
        averager.begin()
        for bucket in small.read(averager, small.gradients(2, exchange.rank)):
            averager.average(bucket)
        with reads() as found:
            averager.finish()
        # One for the step, and one for the flush.
        return len(found), averager.state_dict()["flushing"]

    assert small.on_ranks(1, body) == [(2, False)]


# --- The concluding message -----------------------------------------------------------------------


def finding(value):
    return torch.tensor([value], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("findings", "words"),
    [
        ([(1, finding(wire.INTACT)), (0, finding(wire.INTACT))], []),
        ([(1, finding(wire.DAMAGED)), (0, finding(wire.INTACT))], ["rank 1's"]),
        ([(1, finding(wire.OTHER_LENGTH)), (0, [wire.DAMAGED])], ["rank 1's", "rank 0's"]),
    ],
)
def test_findings_on_a_device_are_read_with_one_wait(findings, words):
    exchange = InProcessExchange.alone(torch.device("cpu"))
    for sender, value in findings:
        receive(exchange, sender, value)
    answer = exchange.any_at_end([True, False, True])
    assert answer == []
    with reads() as found:
        error = caught(lambda: exchange.conclude(torch.tensor(True), "a test", ""))
    assert answer == [True, False, True]
    assert not exchange.must_conclude
    if words:
        assert type(error) is WireError
        assert all(word in str(error) for word in words)
    else:
        assert (error, found) == (None, ["tolist"])


def test_answers_are_those_of_any_rank_and_end_with_the_step():
    def body(exchange):
        first = exchange.any_at_end([exchange.rank == 1, False])
        second = exchange.any_at_end([exchange.rank == 0])
        assert exchange.conclude(None, "a test", "")
        discarded = exchange.any_at_end([True])
        exchange.reset()
        assert exchange.conclude(None, "a test", "")
        return first, second, discarded

    assert small.on_ranks(2, body) == [([True, False], [True], [])] * 2


@pytest.mark.parametrize("finite", [torch.tensor(True), torch.tensor(False), None])
def test_without_frames_and_flags_nothing_is_sent(finite):
    exchange = InProcessExchange.alone(torch.device("cpu"))
    with mock.patch.object(exchange, "any_of") as any_of, reads() as found:
        outcome = exchange.conclude(finite, "a test", "")
    assert outcome is (finite is None or bool(finite))
    assert found == ([] if finite is None else ["__bool__"])
    any_of.assert_not_called()


# --- The state ------------------------------------------------------------------------------------


def slot(name, names, dtype=torch.float32, kind=Kind.DEBT):
    return Slot(name, kind, names, (3,) * len(names), dtype)


def test_a_change_of_the_loss_scale_takes_one_launch_for_each_dtype():
    state, cpu = State(), torch.device("cpu")
    for number in range(3):
        for dtype in (torch.float32, torch.float64):
            names = tuple(f"{dtype} {number} {part}" for part in "abc")
            state.open(slot(f"error {dtype}", names, dtype), cpu)[1].fill_(1.0)
    state.open(slot("thresholds", ("a",), kind=Kind.CACHE), cpu)[1].fill_(1.0)
    state.commit()
    state.load("momentum", Kind.ESTIMATE, False, {"a": torch.ones(3), "b": torch.ones(3)})
    with Launches() as launches:
        state.scale(0.5)
    assert launches.counts == {"_foreach_mul_": 2}
    for name, expected in [("error torch.float32", 0.5), ("momentum", 0.5), ("thresholds", 1.0)]:
        values = dict(state.items(name))
        assert values
        assert all(part.eq(expected).all() for part in values.values())


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
