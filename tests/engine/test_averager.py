"""The engine without DDP: conservation, errors on all ranks, swaps, late parameters."""

import threading

import pytest
import torch

import torchcomp
from tests.engine import small
from tests.support.outcomes import caught, messages_of, same
from torchcomp import NonFiniteError, RankMismatchError, SpecError
from torchcomp.checkpoints import resume
from torchcomp.engine.state import Kind, Slot

TOPK = "ef(topk(0.3))"

# --- Steps ----------------------------------------------------------------------------------------


def test_a_method_gets_the_whole_model_as_one_bucket_by_default():
    def body(exchange, **options):
        averager = small.averager(exchange, 'ef(topk(k=3, scope="model"))', **options)
        (means,) = small.train(averager, 0, 1)
        return averager.buckets, sum(int(mean.count_nonzero()) for mean in means.values())

    (buckets, kept), _ = small.on_ranks(2, body)
    assert buckets == (tuple(name for group in small.GROUPS for name in group),)
    assert kept <= 6
    (buckets, kept), _ = small.on_ranks(2, lambda e: body(e, merged=False))
    assert buckets == small.GROUPS
    assert kept > 6


def test_finish_calls_its_callbacks_with_its_result_unless_it_raises():
    def body(exchange):
        calls = []
        averager = small.averager(exchange, TOPK)
        averager.on_finish(calls.append)
        averager.on_finish(lambda counts: calls.append(averager.step))
        small.step(averager, small.gradients(0, exchange.rank))
        tensors = small.poisoned(1, exchange.rank, torch.inf)
        small.step(averager, tensors, may_skip=True)
        assert caught(lambda: small.step(averager, tensors))
        return calls

    assert small.on_ranks(2, body) == [[True, 1, False, 2]] * 2


def test_a_step_that_was_not_finished_is_rolled_back():
    def body(exchange, breaks):
        averager = small.averager(exchange, TOPK)
        small.train(averager, 0, 2)
        if breaks:
            averager.begin()
            averager.average(small.read(averager, small.gradients(9, exchange.rank))[0])
        return small.train(averager, 2, 4), averager.state_dict()["slots"]

    assert same(*(small.on_ranks(2, lambda e, b=b: body(e, b)) for b in (False, True)))


def test_a_thread_whose_step_was_abandoned_averages_no_more():
    def body(exchange):
        averager = small.averager(exchange, TOPK)
        small.train(averager, 0, 1)
        averager.begin()
        averager.abandon(1)
        bucket = small.read(averager, small.gradients(1, exchange.rank))[0]
        return type(caught(lambda: averager.average(bucket))), averager.state_dict()["step"]

    assert small.on_ranks(2, body) == [(RuntimeError, 1)] * 2


# --- Other methods, groups and parameters ---------------------------------------------------------

SWAPS = [
    TOPK,
    "bidirectional(topk(0.3), topk(0.3))",
    'bidirectional(topk(0.3), topk(0.3), selection="exact")',
    'bidirectional(topk(0.3), topk(0.3, scope="model"))',
    "mean",
    "ef(randk(0.3))",
]


def test_a_swap_returns_what_happens_to_the_residual():
    def body(exchange):
        averager = small.averager(exchange, TOPK)
        messages = [averager.use("ef(topk(0.2))")]
        small.train(averager, 0, 1)
        messages += map(averager.use, ["ef(randk(0.2))", "mean", "ef(topk(.2))"])
        assert type(caught(lambda: averager.use("ef(tpk(0.1))"))) is SpecError
        assert str(averager.aggregator) == "ef(topk(0.2))"
        return messages

    # A flush names the method that it sends the residual with, and the others what continues.
    named = [None, "ef(randk(0.2))", "ef(identity)", "ef(topk(0.2))"]
    for messages in small.on_ranks(2, body):
        for message, name in zip(messages, named, strict=True):
            assert [each for each in named[1:] if each in message] == ([name] if name else [])


@pytest.mark.parametrize("world_size", [2, 3, 5, 7])
@pytest.mark.parametrize("method", ['ef(cast("fp16"))', "ef(identity)"])
def test_gradients_beyond_what_is_sent_wait_in_the_residual(method, world_size):
    # The largest 16-bit numbers of all ranks, each divided by the number of ranks, must not
    # overflow when they are added.
    dtype, value = (torch.float16, 60_000.0) if "identity" in method else (torch.float32, 120_000.0)

    def body(exchange):
        averager = small.averager(exchange, method, dtype=dtype)
        tensors = {n: torch.full_like(p, value) for n, p in averager.parameters.items()}
        return [small.step(averager, tensors)[0] for _ in range(4)]

    assert small.on_ranks(world_size, body) == [[True] * 4] * world_size


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_residual_beyond_the_gradients_range_is_flushed_in_several_steps(world_size, alone):
    """On all ranks, or on one of them: the others send until it has none left."""

    def body(exchange):
        averager = small.averager(exchange, "ef(topk(k=1))", dtype=torch.float16)
        value = 0.0 if alone and exchange.rank else 30_000.0
        tensors = {n: torch.full_like(p, value) for n, p in averager.parameters.items()}
        # k = 1 of each bucket: most of the residual grows far beyond 65,504, the largest fp16.
        applied = [small.step(averager, tensors)[1] for _ in range(8)]
        assert value == 0 or max(averager.residual_norms().values()) > 200_000
        averager.use("mean")
        zeros = {n: torch.zeros_like(p) for n, p in averager.parameters.items()}
        steps = 0
        while averager.state_dict()["flushing"]:
            applied.append(small.step(averager, zeros)[1])
            steps += 1
            assert steps < 20
        return steps, small.total(applied), averager.state_dict()["slots"]

    outcomes = small.on_ranks(world_size, body)
    for steps, total, slots in outcomes:
        assert steps == outcomes[0][0] > 1
        assert slots == {}
        for value in total.values():
            # Each applied mean is rounded to 16 bits, and the residual contains the difference.
            whole = torch.full_like(value, 240_000.0 / (world_size if alone else 1))
            torch.testing.assert_close(value, whole, rtol=1e-3, atol=0)


def test_a_flush_is_saved_and_resumed():
    def body(exchange, resumes):
        averager = small.averager(exchange, "bidirectional(topk(0.3), topk(0.3))")
        small.train(averager, 0, 3)
        averager.use("topk(0.5)")
        if resumes:
            saved, averager = averager.state_dict(), small.averager(exchange, "topk(0.5)")
            averager.load_state_dict(saved)
        return small.train(averager, 3, 6), averager.state_dict()

    whole, resumed = (small.on_ranks(3, lambda e, r=r: body(e, r)) for r in (False, True))
    for (means, state), (again, loaded) in zip(whole, resumed, strict=True):
        assert same(means, again)
        assert same(messages_of(state), messages_of(loaded))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("method", SWAPS)
def test_other_groups_and_late_parameters_lose_nothing(method, world_size):
    def body(exchange):
        averager = small.averager(exchange, method)
        dense, applied, _ = small.book(averager, 0, 3)
        averager.regroup([("gain",), ("matrix", "conv"), ("empty", "bias")])
        more = small.book(averager, 3, 6)
        averager.add({"late": torch.zeros(9, dtype=torch.float64)}, [("late",)])
        tensors = small.gradients(6, exchange.rank) | {"late": torch.arange(9.0).double()}
        _, means = small.step(averager, tensors)
        zero = {"late": torch.zeros(9, dtype=torch.float64)}
        sums = small.total([dense | zero, more[0] | zero, tensors])
        return sums, small.total([applied | zero, more[1] | zero, means]), small.residual(averager)

    small.assert_conserved(small.on_ranks(world_size, body))


# --- All tensors at once --------------------------------------------------------------------------


def test_average_all_writes_means_in_place():
    def body(exchange):
        averager = small.averager(exchange, "mean")
        tensors = small.gradients(0, exchange.rank)
        tensors["conv"] = tensors["conv"].to(memory_format=torch.channels_last)
        assert averager.average_all(tensors)
        return tensors

    every = [small.gradients(0, rank) for rank in range(4)]
    for means in small.on_ranks(4, body):
        for name, mean in means.items():
            dense = torch.stack([each[name] for each in every]).mean(0)
            torch.testing.assert_close(mean, dense, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("value", "options", "kind", "words"),
    [
        (None, {}, SpecError, ["'bias'"]),
        (torch.inf, {}, NonFiniteError, ["'bias' on rank 1"]),
        (torch.inf, {"may_skip": True}, type(None), []),
    ],
)
def test_average_all_leaves_the_tensors_of_a_step_that_does_not_count(value, options, kind, words):
    def body(exchange):
        averager = small.averager(exchange, TOPK)
        tensors = small.poisoned(0, exchange.rank, torch.inf) | ({} if value else {"bias": None})
        before = {name: each if each is None else each.clone() for name, each in tensors.items()}
        error = caught(lambda: averager.average_all(tensors, **options))
        return error, same(tensors, before), averager.step

    for error, untouched, step in small.on_ranks(2, body):
        assert type(error) is kind
        assert all(word in str(error) for word in words)
        assert "matrix" not in str(error)
        assert (untouched, step) == (True, int("may_skip" in options))


def test_a_clients_slots_are_rolled_back_saved_and_restored():
    def declared(shape):
        init = lambda name, out: out.fill_(len(name))  # noqa: E731
        return (
            Slot("reference", Kind.ESTIMATE, shape.names, shape.sizes, torch.float32, init=init),
        )

    def body(exchange):
        averager = small.averager(exchange, TOPK, client_slots=declared)
        fresh = averager.state_dict()["slots"]["reference"]["tensors"]
        assert all((part == len(name)).all() for name, part in fresh.items())
        for value, odd in ((5.0, 0.0), (6.0, torch.nan)):
            averager.begin()
            for bucket in small.read(averager, small.poisoned(0, exchange.rank, odd)):
                averager.average(bucket)
                (slot,) = declared(bucket.shape)
                averager.state.open(slot, bucket.flat.device)[1].fill_(value)
            assert averager.finish(may_skip=True) == (odd == 0)
        state = averager.state_dict()
        again = small.averager(exchange, TOPK, client_slots=declared)
        again.load_state_dict(state)
        assert same(again.state_dict(), state)
        plain = small.averager(exchange, TOPK)
        assert type(caught(lambda: plain.load_state_dict(state))) is torchcomp.CheckpointError
        return {name: part.unique().tolist() for name, part in averager.state.items("reference")}

    for held in small.on_ranks(2, body):
        assert all(values in ([5.0], []) for values in held.values())


# --- The first step, and bad input ----------------------------------------------------------------


DIFFERENT = {
    "seed": {"seed": 5},
    "checksum": {"checksum": True},
    "groups": {"groups": small.GROUPS[::-1]},
    "spec": {"method": "ef(topk(0.4))"},
}


@pytest.mark.parametrize("difference", [*DIFFERENT, "step", "buckets"])
def test_ranks_that_differ_raise_at_the_first_step(difference):
    def body(exchange):
        odd = DIFFERENT.get(difference, {}) if exchange.rank else {}
        averager = small.averager(exchange, **{"method": TOPK} | odd)
        state = averager.state_dict()
        changes = {"step": {"step": 2}, "buckets": {"buckets": state["buckets"][::-1]}}
        if exchange.rank and difference in changes:  # of a checkpoint that one rank loads
            averager.load_state_dict(state | changes[difference])
        step = averager.step
        error = caught(lambda: small.step(averager, small.gradients(3, exchange.rank)))
        return error, averager.step - step

    for error, steps in small.on_ranks(2, body):
        assert type(error) is RankMismatchError
        assert f"{difference}: " in str(error)
        assert "on rank 1" in str(error)
        assert steps == 0


def test_ranks_that_search_with_triton_and_without_it_raise_before_they_search(monkeypatch):
    exact = 'bidirectional(topk(0.3), topk(0.3), selection="exact")'
    here = threading.local()
    monkeypatch.setattr(resume, "fast_form", lambda stem, device: here.form)

    def body(exchange):
        here.form = exchange.rank or None
        averager = small.averager(exchange, TOPK)
        small.train(averager, 0, 1)
        averager.use(exact)
        return caught(lambda: small.train(averager, 1, 2))

    for error in small.on_ranks(2, body):
        assert type(error) is RankMismatchError
        assert "Triton: [False] on rank 0, [True] on rank 1" in str(error)


REFUSED = {
    "seed -1": lambda e: small.averager(e, "mean", seed=-1),
    "seed 1.0": lambda e: small.averager(e, "mean", seed=1.0),
    "spec": lambda e: small.averager(e, "ef(tpk(0.1))"),
    **{
        f"lr {lr}": lambda e, lr=lr: small.averager(e, TOPK).begin(lr=lr)
        for lr in (-0.1, torch.nan, torch.inf, "0.1", {"conv": 0.1})
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case):
    error = caught(lambda: REFUSED[case](torchcomp.InProcessExchange.ranks(1)[0]))
    assert type(error) is SpecError
    assert case.split()[0] in str(error) or case == "spec"
