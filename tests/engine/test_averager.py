"""The engine without DDP: conservation, errors on all ranks, swaps, late parameters."""

import pytest
import torch

import torchcomp
from tests.engine import small
from tests.support.cases import thorough
from tests.support.models import CONSERVING, METHODS, WITH_RESIDUAL
from tests.support.outcomes import caught, messages, same
from torchcomp import NonFiniteError, RankMismatchError, SpecError
from torchcomp.engine.bucket import Bucket

# --- Steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("method", CONSERVING)
def test_nothing_is_lost(method, world_size):
    books = small.on_ranks(world_size, lambda e: small.book(small.averager(e, method), 0, 6))
    small.assert_conserved(books)
    assert any(part.any() for part in books[0][2].values())


def compared_again(state):
    """Return a state as if it had been loaded: the three ranks then compare their settings again.

    That takes 16 bytes to each of the other two ranks.
    """
    return state | {"traffic": state["traffic"] | {"control": state["traffic"]["control"] + 32}}


@pytest.mark.parametrize("dtype", [torch.float32, *thorough([torch.float16])], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_replicas_are_equal_bit_for_bit_and_a_run_is_repeated_bit_for_bit(method, dtype):
    def body(exchange):
        averager = small.averager(exchange, method, dtype=dtype)
        return small.train(averager, 0, 3, dtype), small.train(averager, 3, 5, dtype), averager

    first = small.on_ranks(3, body)
    assert all(same(outcome[:2], first[0][:2]) for outcome in first)
    assert all(t.isfinite().all() for means in first[0][0] for t in means.values())

    def resumed(exchange):
        averager = small.averager(exchange, method, dtype=dtype)
        small.train(averager, 0, 3, dtype)
        again = small.averager(exchange, method, dtype=dtype, seed=7)
        again.load_state_dict(averager.state_dict())
        return small.train(again, 3, 5, dtype), again

    second = small.on_ranks(3, resumed)
    for (_, one, averager), (other, again) in zip(first, second, strict=True):
        assert same(one, other)
        assert same(compared_again(averager.state_dict()), again.state_dict())
        assert messages(averager.stats) == messages(again.stats)


def test_mean_is_the_mean():
    def body(exchange):
        return small.train(small.averager(exchange, "mean"), 0, 1)[0]

    means = small.on_ranks(4, body)[0]
    for name, mean in means.items():
        dense = torch.stack([small.gradients(0, rank)[name] for rank in range(4)]).mean(0)
        torch.testing.assert_close(mean, dense, rtol=0, atol=1e-15)


def test_a_method_gets_the_whole_model_as_one_bucket_by_default():
    def body(exchange, **options):
        averager = small.averager(exchange, 'ef(topk(k=3, scope="model"))', **options)
        (means,) = small.train(averager, 0, 1)
        kept = sum(int(mean.count_nonzero()) for mean in means.values())
        return averager.buckets, kept

    (buckets, kept), _ = small.on_ranks(2, body)
    assert buckets == (tuple(name for group in small.GROUPS for name in group),)
    assert kept <= 6
    (buckets, kept), _ = small.on_ranks(2, lambda e: body(e, merged=False))
    assert buckets == small.GROUPS
    assert kept > 6


# --- NaN and infinities ---------------------------------------------------------------------------


def poisoned(step, rank, dtype, odd, culprit=1, names=("bias",)):
    tensors = small.gradients(step, rank, dtype)
    if rank == culprit:
        for name in names:
            tensors[name].view(-1)[-1] = odd
    return tensors


@pytest.mark.parametrize("odd", [float("nan"), *thorough([float("inf"), -float("inf")])])
@pytest.mark.parametrize("dtype", [torch.float16, *thorough([torch.float64])])
@pytest.mark.parametrize("method", METHODS)
def test_a_nan_on_one_rank_raises_on_every_rank_and_changes_no_state(method, dtype, odd):
    def body(exchange):
        averager = small.averager(exchange, method, dtype=dtype)
        small.train(averager, 0, 2, dtype)
        before = averager.state_dict()
        tensors = poisoned(2, exchange.rank, dtype, odd, names=("bias", "gain"))
        error = caught(lambda: small.step(averager, tensors))
        if averager.aggregator.transparent:
            return error, None, None
        after = averager.state_dict()
        kept = {key for key in before if not same(before[key], after[key])}
        counts, _ = small.step(averager, tensors, may_skip=True)
        skipped = {k for k, v in averager.state_dict().items() if not same(before[k], v)}
        return error, kept, (counts, skipped, small.train(averager, 3, 4, dtype))

    for error, changed, later in small.on_ranks(2, body):
        if changed is None:
            assert error is None
            continue
        assert type(error) is NonFiniteError
        assert "'bias', 'gain' on rank 1" in str(error) or "'gain', 'bias' on rank 1" in str(error)
        assert "rank 0" not in str(error)
        assert "step 3" in str(error)
        # Bytes were sent, but the residual and the step index did not change.
        assert changed == {"traffic"}
        counts, skipped, (means,) = later
        assert counts is False
        assert skipped == {"traffic", "step"}
        assert all(mean.isfinite().all() for mean in means.values())


def test_finish_calls_its_callbacks_with_its_result_unless_it_raises():
    def body(exchange):
        calls = []
        averager = small.averager(exchange, "ef(topk(0.3))")
        averager.on_finish(calls.append)
        averager.on_finish(lambda counts: calls.append(averager.step))
        small.step(averager, small.gradients(0, exchange.rank))
        tensors = poisoned(1, exchange.rank, torch.float64, float("inf"))
        small.step(averager, tensors, may_skip=True)
        assert caught(lambda: small.step(averager, tensors))
        return calls

    assert small.on_ranks(2, body) == [[True, 1, False, 2]] * 2


def test_an_error_has_the_culprit_the_step_and_the_advice():
    def body(exchange):
        options = {"what": "a weight", "unchanged": "All is as it was."}
        averager = small.averager(exchange, "ef(topk(0.3))", **options)
        tensors = poisoned(1, exchange.rank, torch.float64, float("nan"))
        call = lambda: small.step(averager, tensors, where="round 7", advice="Look.")  # noqa: E731
        return str(caught(call))

    for message in small.on_ranks(2, body):
        for part in ("a weight", "round 7", "'bias' on rank 1", "All is as it was.", "Look."):
            assert part in message


def test_a_step_that_was_not_finished_is_rolled_back():
    def body(exchange, breaks):
        averager = small.averager(exchange, "ef(topk(0.3))")
        small.train(averager, 0, 2)
        if breaks:
            averager.begin()
            averager.average(small.read(averager, small.gradients(9, exchange.rank))[0])
        return small.train(averager, 2, 4), averager.state_dict()["slots"]

    whole, broken = (small.on_ranks(2, lambda e, b=b: body(e, b)) for b in (False, True))
    assert same(whole, broken)


# --- The loss scale -------------------------------------------------------------------------------

SCALES = [1.0, 4.0, 4.0, 0.5, 2.0**16, 1.0]


@pytest.mark.parametrize("method", ["ef(topk(0.2))", "bidirectional(topk(0.2), topk(0.2))"])
def test_the_state_follows_a_loss_scale_of_powers_of_two_bit_for_bit(method):
    def body(exchange, scales):
        averager, means = small.averager(exchange, method), []
        for i, scale in enumerate(scales):
            scaled = {n: g * scale for n, g in small.gradients(i, exchange.rank).items()}
            counts, mean = small.step(averager, scaled, scale)
            assert counts
            means.append({name: value / scale for name, value in mean.items()})
        return means, averager.state_dict()["slots"]

    plain = small.on_ranks(2, lambda e: body(e, [1.0] * len(SCALES)))
    assert same(small.on_ranks(2, lambda e: body(e, SCALES)), plain)


def test_a_loaded_state_follows_the_scale_it_was_saved_at():
    def body(exchange):
        averager = small.averager(exchange, "ef(topk(0.2))")
        scaled = {n: g * 8 for n, g in small.gradients(0, exchange.rank).items()}
        small.step(averager, scaled, 8.0)
        state = averager.state_dict()
        again = small.averager(exchange, "ef(topk(0.2))")
        again.load_state_dict(state)
        again.begin(1.0)
        left = again.residual_norms()
        return all(left[n] == norm / 8 for n, norm in averager.residual_norms().items())

    assert small.on_ranks(2, body) == [True, True]


# --- Other methods --------------------------------------------------------------------------------

SWAPS = [
    "ef(topk(0.3))",
    "bidirectional(topk(0.3), topk(0.3))",
    'bidirectional(topk(0.3), topk(0.3), selection="exact")',
    'bidirectional(topk(0.3), topk(0.3, scope="model"))',
    "mean",
    "ef(randk(0.3))",
]


@pytest.mark.parametrize("world_size", [3, *thorough([2])])
@pytest.mark.parametrize("second", SWAPS)
@pytest.mark.parametrize("first", SWAPS)
def test_a_swap_loses_nothing(first, second, world_size):
    def body(exchange):
        averager = small.averager(exchange, first)
        books = [small.book(averager, 0, 3)]
        message = averager.use(second)
        assert str(averager.aggregator) == str(torchcomp.parse(second))
        books += [small.book(averager, 3, 6), small.book(averager, 6, 7)]
        dense, applied = (small.total([book[i] for book in books]) for i in (0, 1))
        state = averager.state_dict()
        return (dense, applied, books[-1][2]), message, state["flushing"], set(state["slots"])

    outcomes = small.on_ranks(world_size, body)
    small.assert_conserved([outcome[0] for outcome in outcomes])
    for _, message, flushing, slots in outcomes:
        assert message
        # The flush has ended, because its first step sends the whole residual.
        assert not flushing
        method = torchcomp.parse(second)
        shape = torchcomp.engine.bucket.BucketShape(("x",), ((4,),), torch.float64)
        assert slots == {slot.name for slot in method.slots(shape, world_size, 0)}


def test_a_swap_returns_what_happens_to_the_residual():
    def body(exchange):
        averager = small.averager(exchange, "ef(topk(0.3))")
        messages = [averager.use("ef(topk(0.2))")]
        small.train(averager, 0, 1)
        messages += map(averager.use, ["ef(randk(0.2))", "mean", "ef(topk(.2))"])
        assert caught(lambda: averager.use("ef(tpk(0.1))")).__class__ is SpecError
        assert str(averager.aggregator) == "ef(topk(0.2))"
        return messages

    for nothing, kept, flushed, kept_again in small.on_ranks(2, body):
        # Only a flush names the method that it sends the residual with.
        assert "ef(identity)" in flushed
        assert not any("ef(identity)" in message for message in (nothing, kept, kept_again))
        assert "ef(randk(0.2))" in kept
        assert "ef(topk(0.2))" in kept_again
        assert "ef(topk(0.2))" not in nothing


@pytest.mark.parametrize("world_size", [2, 3, 5, 7])
@pytest.mark.parametrize("method", ['ef(cast("fp16"))', "ef(identity)"])
def test_gradients_beyond_what_is_sent_wait_in_the_residual(method, world_size):
    # The largest 16-bit numbers of all ranks, each divided by the number of ranks, must not
    # overflow when they are added.
    def body(exchange):
        dtype = torch.float16 if "identity" in method else torch.float32
        averager = small.averager(exchange, method, dtype=dtype)
        tensors = {n: torch.full_like(p, 60_000.0) for n, p in averager.parameters.items()}
        if dtype == torch.float32:
            tensors = {name: tensor * 2 for name, tensor in tensors.items()}
        return [small.step(averager, tensors)[0] for _ in range(4)]

    assert small.on_ranks(world_size, body) == [[True] * 4] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_residual_beyond_the_gradients_range_is_flushed_in_several_steps(world_size):
    def body(exchange):
        averager = small.averager(exchange, "ef(topk(k=1))", dtype=torch.float16)
        tensors = {n: torch.full_like(p, 30_000.0) for n, p in averager.parameters.items()}
        # k = 1 of each bucket: most of the residual grows far beyond 65,504, the largest fp16.
        applied = [small.step(averager, tensors)[1] for _ in range(8)]
        assert max(averager.residual_norms().values()) > 200_000
        averager.use("mean")
        zeros = {n: torch.zeros_like(p) for n, p in averager.parameters.items()}
        steps = 0
        while averager.state_dict()["flushing"]:
            applied.append(small.step(averager, zeros)[1])
            steps += 1
            assert steps < 10
        total = small.total(applied)
        return steps, total, averager.state_dict()["slots"]

    for steps, total, slots in small.on_ranks(world_size, body):
        assert steps > 1
        assert slots == {}
        for value in total.values():
            # Each applied mean is rounded to 16 bits, and the residual contains the difference.
            torch.testing.assert_close(value, torch.full_like(value, 240_000.0), rtol=1e-3, atol=0)


def test_a_flush_is_saved_and_resumed():
    def body(exchange, resumes):
        averager = small.averager(exchange, "bidirectional(topk(0.3), topk(0.3))")
        small.train(averager, 0, 3)
        averager.use("topk(0.5)")
        if resumes:
            again = small.averager(exchange, "topk(0.5)")
            again.load_state_dict(averager.state_dict())
            averager = again
        return small.train(averager, 3, 6), averager.state_dict()

    whole, resumed = (small.on_ranks(3, lambda e, r=r: body(e, r)) for r in (False, True))
    assert same([(means, compared_again(state)) for means, state in whole], resumed)


# --- Other groups, later parameters ---------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("method", SWAPS)
def test_other_groups_lose_nothing(method, world_size):
    def body(exchange):
        averager = small.averager(exchange, method)
        books = [small.book(averager, 0, 3)]
        averager.regroup([("gain",), ("matrix", "conv"), ("empty", "bias")])
        books.append(small.book(averager, 3, 6))
        dense, applied = (small.total([book[i] for book in books]) for i in (0, 1))
        return dense, applied, books[-1][2]

    small.assert_conserved(small.on_ranks(world_size, body))


@pytest.mark.parametrize("method", SWAPS)
def test_late_parameters_are_averaged_with_the_others(method):
    def body(exchange):
        averager = small.averager(exchange, method)
        small.train(averager, 0, 2)
        before = small.residual(averager)
        averager.add({"late": torch.zeros(9, dtype=torch.float64)}, [("late",)])
        tensors = small.gradients(2, exchange.rank) | {"late": torch.arange(9.0).double()}
        _, means = small.step(averager, tensors)
        dense = {name: tensors[name] + before.get(name, 0) for name in tensors}
        return dense, means, small.residual(averager)

    small.assert_conserved(small.on_ranks(2, body))


# --- All tensors at once --------------------------------------------------------------------------


def test_average_all_writes_means_in_place():
    def body(exchange):
        averager = small.averager(exchange, "mean")
        tensors = small.gradients(0, exchange.rank)
        tensors["conv"] = tensors["conv"].to(memory_format=torch.channels_last)
        counts = averager.average_all(tensors)
        expected = small.train(small.averager(exchange, "mean"), 0, 1)[0]
        return counts, all(torch.equal(tensors[name], expected[name]) for name in expected)

    assert small.on_ranks(2, body) == [(True, True)] * 2


@pytest.mark.parametrize(
    ("change", "options", "kind", "words"),
    [
        ({"bias": None, "gain": None}, {}, SpecError, ["'bias'", "'gain'"]),
        ({"bias": float("inf")}, {}, NonFiniteError, ["'bias' on rank 1"]),
        ({"bias": float("inf")}, {"may_skip": True}, type(None), []),
    ],
)
def test_average_all_leaves_the_tensors_of_a_step_that_does_not_count(change, options, kind, words):
    def body(exchange):
        averager = small.averager(exchange, "ef(topk(0.3))")
        tensors = small.gradients(0, exchange.rank)
        for name, value in change.items():
            if value is None:
                tensors[name] = None
            elif exchange.rank:
                tensors[name].view(-1)[-1] = value
        before = {
            name: tensor if tensor is None else tensor.clone() for name, tensor in tensors.items()
        }
        error = caught(lambda: averager.average_all(tensors, **options))
        return error, same(tensors, before), averager.step

    for error, untouched, step in small.on_ranks(2, body):
        assert type(error) is kind
        assert all(word in str(error) for word in words)
        assert "matrix" not in str(error)
        assert (untouched, step) == (True, int("may_skip" in options))


# --- Counters, norms and client slots -------------------------------------------------------------


# Those of a warm-up differ from stage to stage: see tests/aggregators/test_warmup.py.
@pytest.mark.parametrize("method", [each for each in METHODS if "warmup" not in each])
def test_counters_equal_the_planned_cost(method):
    def body(exchange):
        averager = small.averager(exchange, method, dtype=torch.float32)
        small.train(averager, 0, 3, torch.float32)
        shapes = [averager.shape_of(group) for group in averager.buckets]
        load = torchcomp.exchange.traffic.Load()
        for shape in shapes:
            load.add(averager.aggregator.cost(shape, 3, exchange.rank).load)
        return averager.stats, load.traffic(3, 0), "exact" in str(averager.aggregator)

    for stats, planned, exact in small.on_ranks(3, body):
        assert (stats.steps, stats.syncs) == (3, 3)
        assert stats.total_dense_bytes_sent == 3 * stats.dense_bytes_sent
        assert stats.dense_bytes_sent == 2 * 2 * 4 * (35 + 6 + 24 + 1) // 3
        # The traffic of these two depends on the values, so their plan is an average.
        if 'exchange="sharded"' not in method and not exact:
            assert (stats.bytes_sent, stats.bytes_received) == (planned.sent, planned.received)
            assert stats.total_bytes_sent == 3 * stats.bytes_sent


@pytest.mark.parametrize("method", WITH_RESIDUAL)
def test_residual_norms_equal_those_of_the_saved_state(method):
    def body(exchange):
        averager = small.averager(exchange, method)
        assert averager.residual_norms() == averager.residual_norms("foreign") == {}
        small.train(averager, 0, 2)
        saved = averager.state_dict()["slots"]
        for slot in ("error", "server_error"):
            norms = averager.residual_norms(slot)
            tensors = saved.get(slot, {"tensors": {}})["tensors"]
            assert norms.keys() == tensors.keys()
            for name, norm in norms.items():
                assert norm == pytest.approx(float(tensors[name].float().norm()), rel=1e-2)

    small.on_ranks(2, body)


def test_a_clients_slots_are_rolled_back_saved_and_restored():
    from torchcomp.engine.state import Kind, Slot

    def declared(shape):
        def init(name, out):
            out.fill_(len(name))

        names, sizes = shape.names, shape.sizes
        return (Slot("reference", Kind.ESTIMATE, names, sizes, torch.float32, init=init),)

    def body(exchange):
        averager = small.averager(exchange, "ef(topk(0.3))", client_slots=declared)
        fresh = averager.state_dict()["slots"]["reference"]["tensors"]
        assert all((part == len(name)).all() for name, part in fresh.items())

        def step(value, odd=None, **options):
            tensors = small.gradients(0, exchange.rank)
            if odd is not None:
                tensors["bias"][0] = odd
            averager.begin()
            for bucket in small.read(averager, tensors):
                averager.average(bucket)
                (slot,) = declared(bucket.shape)
                averager.state.open(slot, bucket.flat.device)[1].fill_(value)
            return averager.finish(**options)

        assert step(5.0)
        assert not step(6.0, float("nan"), may_skip=True)
        state = averager.state_dict()
        again = small.averager(exchange, "ef(topk(0.3))", client_slots=declared)
        again.load_state_dict(state)
        assert same(again.state_dict(), state)
        plain = small.averager(exchange, "ef(topk(0.3))")
        error = caught(lambda: plain.load_state_dict(state))
        assert type(error) is torchcomp.CheckpointError
        return {name: part.unique().tolist() for name, part in averager.state.items("reference")}

    for held in small.on_ranks(2, body):
        assert all(values in ([5.0], []) for values in held.values())


# --- The first step -------------------------------------------------------------------------------


@pytest.mark.parametrize("difference", ["seed", "spec", "groups", "checkpoint", "buckets"])
def test_ranks_that_differ_raise_at_the_first_step(difference):
    def body(exchange):
        odd = exchange.rank == 1
        method = "ef(topk(0.4))" if odd and difference == "spec" else "ef(topk(0.3))"
        groups = small.GROUPS[::-1] if odd and difference == "groups" else small.GROUPS
        seed = 5 if odd and difference == "seed" else 0
        averager = small.averager(exchange, method, groups=groups, seed=seed)
        if difference == "checkpoint":
            small.train(averager, 0, 2)
            state = averager.state_dict()
            averager = small.averager(exchange, method)
            if odd:
                averager.load_state_dict(state)
        if odd and difference == "buckets":
            state = averager.state_dict()
            averager.load_state_dict(state | {"buckets": state["buckets"][::-1]})
        step = averager.step
        error = caught(lambda: small.step(averager, small.gradients(3, exchange.rank)))
        return error, averager.step - step

    for error, steps in small.on_ranks(2, body):
        assert type(error) is RankMismatchError
        assert "on rank 1" in str(error)
        assert steps == 0


@pytest.mark.parametrize("seed", [-1, 1.0])
def test_an_invalid_seed_is_refused(seed):
    (exchange,) = torchcomp.InProcessExchange.ranks(1)
    with pytest.raises(SpecError):
        small.averager(exchange, "mean", seed=seed)


def test_groups_default_to_those_of_ddp():
    (exchange,) = torchcomp.InProcessExchange.ranks(1)
    parameters = small.parameters()
    averager = torchcomp.Averager("ef(topk(0.1))", exchange, parameters)
    assert averager.buckets == (tuple(reversed(parameters)),)
    assert isinstance(Bucket.read(averager.shape_of(averager.buckets[0]), parameters), Bucket)


def test_a_thread_whose_step_was_abandoned_averages_no_more():
    parameters = {"w": torch.zeros(4)}

    def body(exchange):
        averager = torchcomp.Averager("ef(topk(0.5))", exchange, parameters)
        averager.average_all({"w": torch.arange(4.0)})
        averager.begin()
        averager.abandon(1)
        bucket = Bucket.read(averager.shape_of(averager.buckets[0]), parameters)
        return caught(lambda: averager.average(bucket)), averager.state_dict()["step"]

    for error, step in torchcomp.run_in_process(2, body):
        assert isinstance(error, RuntimeError)
        assert step == 1
