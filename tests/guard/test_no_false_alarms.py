"""What happens in healthy runs raises no alarm, and the guard goes on after it."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import torchcomp
from tests.engine import small
from tests.guard.runs import Watched, drifting
from tests.support.cases import thorough
from tests.support.models import Branches, loss_of, mlp, rows, wrap
from tests.support.outcomes import caught
from tests.support.ranks import on_threads
from torchcomp import Guard, NonFiniteError, register

TOPK = "ef(topk(0.1))"
BF16 = 'ef(topk(0.1, scope="tensor"), memory_dtype="bf16")'
METHODS = [TOPK, *thorough([BF16, "dgc(topk(0.1))", "bidirectional(topk(0.1), topk(0.1))", "mean"])]
OFTEN = Guard(every=2, age=10)
"""Compares in every second step, so that each event is right before and after a comparison."""


def step(watched, number, poison=False, lr=None, size=1.0, **options):
    """Run a step of one rank; with `poison`, rank 1 has a NaN. Return what it raises."""
    averager = watched.averager
    tensors = drifting(number, averager.exchange.rank)
    for tensor in tensors.values():
        tensor.mul_(size)
    if poison and averager.exchange.rank == 1:
        tensors["bias"][0] = torch.nan

    def body():
        averager.begin(lr=lr)
        for bucket in small.read(averager, tensors):
            averager.average(bucket)
        averager.finish(**options)

    return caught(body)


def nan_that_raises(watched):
    for number in range(12):
        error = step(watched, number, poison=number in (3, 4, 7))
        assert error is None or isinstance(error, NonFiniteError)


def falling_and_zero_lr(watched):
    for number in range(70):
        lr = dict.fromkeys(watched.averager.parameters, 0.1 * 0.9**number)
        if number in (3, 4) or 8 < number < 60:  # a layer rests for long
            lr["matrix"] = 0.0
        step(watched, number, lr=lr)


def error_in_the_middle_of_a_step(watched):
    for number in range(12):
        if number in (3, 4, 7):
            watched.averager.begin()
            (bucket, *_) = small.read(watched.averager, drifting(number, 0))
            watched.averager.average(bucket)
        if number == 7:
            watched.averager.abandon(watched.averager.step)
            watched.averager.abandoned = False
        step(watched, number)


def swaps_and_flushes(watched):
    methods = ["mean", TOPK, "powersgd(rank=1)", "topk(0.9)", BF16, "ef21(topk(0.2))"]
    for number, to in enumerate(methods):
        for each in range(4):
            step(watched, 10 * number + each)
        watched.averager.use(to)
        step(watched, 10 * number + 9)


def flush_of_a_parameter_that_is_unused(watched):
    watched.train(0, 5)
    watched.averager.use("mean")
    for number in range(5, 15):
        step(watched, number, used=["bias", "conv", "empty"])


def tiny_gradients(watched):
    for number in range(12):
        step(watched, number, size=1e-24 if number > 3 else 1.0)


def loaded_states(watched):
    watched.train(0, 5)
    state = watched.averager.state_dict()
    watched.train(5, 8)
    watched.averager.load_state_dict(state)
    watched.train(5, 15)


def other_groups(watched):
    for number in range(0, 12, 3):
        watched.train(number, number + 3)
        watched.averager.regroup(list(reversed(watched.averager.groups)))


EVENTS = [nan_that_raises, falling_and_zero_lr, error_in_the_middle_of_a_step, swaps_and_flushes]
EVENTS += [flush_of_a_parameter_that_is_unused, tiny_gradients, loaded_states, other_groups]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
@pytest.mark.parametrize("method", METHODS)
def test_there_is_no_false_alarm(method, event):
    def body(exchange):
        watched = Watched(exchange, method, guard=OFTEN)
        event(watched)
        last = watched.averager.step
        watched.averager.settle()
        return watched.alarms, watched.guard.report.step, last

    for alarms, compared, last in small.on_ranks(2, body):
        assert not alarms
        assert last - 2 < compared <= last


def test_a_late_error_discards_the_comparison_of_its_step():
    def body(exchange):
        watched = Watched(exchange, TOPK, guard=OFTEN, late=True)
        step(watched, 0)
        assert step(watched, 1, poison=True) is None
        assert isinstance(step(watched, 2), NonFiniteError)
        reports = [watched.guard.report]
        for number in range(2, 8):
            assert step(watched, number) is None
        watched.averager.settle()
        return watched.alarms, reports, watched.guard.report.step

    assert small.on_ranks(2, body) == [([], [None], 6)] * 2


def quiet(ranks, method, gradients, steps=50, guard=Guard(), groups=None):  # noqa: B008
    """Require that a run has no alarm, and that its last step was compared."""

    def body(exchange):
        alarms = []
        made = torchcomp.Averager(method, exchange, gradients(0, 0), groups)
        watched = torchcomp.watch(made, replace(guard, callback=alarms.append))
        for number in range(steps):
            made.average_all(gradients(number, exchange.rank))
        made.settle()
        return alarms, watched.guard.report.step

    assert small.on_ranks(ranks, body) == [([], steps)] * ranks


def drawn(number, rank, **shapes):
    noise = torch.Generator().manual_seed(100 * number + rank)
    return {name: torch.randn(shape, generator=noise) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "method",
    ["ef(warmup(topk(0.1), steps=6))", *thorough(["dgc(warmup(topk(0.1), steps=6, start=0.5))"])],
)
def test_compressors_that_warm_up(method):
    quiet(2, method, small.gradients, 14, OFTEN)


@pytest.mark.parametrize(
    "method", ["mean", "ef(topk(0.01))", *thorough(["powersgd(rank=1)", "ef21(topk(0.01))"])]
)
def test_small_gradients_and_rows_that_no_batch_uses(method):
    def gradients(number, rank):
        values = drawn(number, rank, large=(200, 100), small=(100, 100), rows=(2000, 4))
        values["small"].mul_(0.2)
        # Of an embedding, a batch uses two rows.
        used = torch.randint(0, 2000, (2,), generator=torch.Generator().manual_seed(number))
        rows_of = torch.zeros(2000, 4)
        rows_of[used] = 20 * values["rows"][used]
        return values | {"rows": rows_of}

    quiet(2, method, gradients)


def test_the_rounding_of_a_large_server_residual():
    constant = drawn(0, 0, p=(20_000,))["p"]

    def gradients(number, rank):
        return {"p": constant + 0.3 * drawn(number, rank, p=(20_000,))["p"]}

    quiet(2, 'bidirectional(identity, topk(0.002), memory_dtype="bf16")', gradients)


@pytest.mark.parametrize("scope", ["tensor", "bucket"])
@pytest.mark.parametrize("ratio", [0.0002, 0.001])
@pytest.mark.parametrize("compressor", ["topk", "randk"])
def test_a_low_ratio_sends_little_of_a_large_parameter(compressor, ratio, scope):
    gradients = partial(drawn, large=(150, 200), small=(30,), alone=(90, 90))
    method, groups = f'ef({compressor}({ratio}, scope="{scope}"))', (("large", "small"), ("alone",))
    quiet(2, method, gradients, 100, Guard(every=25), groups)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients_that_fp16_cannot_represent(dtype):
    def gradients(number, rank):
        values = drawn(number, rank, usual=(1000,), faint=(1000,))
        values["faint"] *= 1e-6
        return {name: value.to(dtype) for name, value in values.items()}

    quiet(3, 'cast("fp16")', gradients, 4, OFTEN)


def trained(spec, scaler=False, accumulate=1, branches=None, **options):
    """Train a model with a guard; return its alarms, the last report's step, and the step."""
    alarms, dtype = [], torch.float32
    model = wrap(Branches(), find_unused_parameters=True) if branches else wrap(mlp(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scale = torch.amp.GradScaler("cpu", 2.0**127, growth_interval=2, enabled=scaler)
    if options.get("lr_inside"):
        options["lr_inside"] = optimizer
    guard = Guard(every=2, age=10, callback=alarms.append)
    handle = register(model, spec, guard=guard, scaler=scale if scaler else None, **options)
    for number in range(12):
        used = [branches[: 1 + number % 2]] if branches else []
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.01 * (number % 5)
        with model.no_sync():
            for each in range(accumulate - 1):
                loss_of(model(rows(100 * number + each, dtype), *used)).backward()
        scale.scale(loss_of(model(rows(number, dtype), *used))).backward()
        scale.step(optimizer)
        scale.update()
    handle.state_dict()
    handle.close()
    return alarms, handle.guard.report.step, handle.averager.step


RUNS = {
    "overflows": {"scaler": True},
    "accumulation": {"accumulate": 3},
    "a zero learning rate": {"lr_inside": True},
    "late checks": {"check": "late"},
    "unused": {"branches": ["left", "right"]},
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("spec", [TOPK, *thorough(["mean", "dgc(topk(0.1))", "powersgd(rank=1)"])])
def test_there_is_no_false_alarm_through_ddp(spec, run):
    for alarms, compared, last in on_threads(2, lambda: trained(spec, **dict(RUNS[run]))):
        assert not alarms
        assert last - 2 < compared <= last
