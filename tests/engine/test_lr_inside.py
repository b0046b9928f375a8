"""The learning rate inside the residual, against a plain version of the thesis's algorithm."""

import math

import pytest
import torch

import torchcomp
from tests.engine import small
from tests.support.outcomes import caught, same
from torchcomp import RankMismatchError

N, D, K, STEPS = 3, 40, 4, 20
TOPK = f"topk(k={K})"
METHODS = {
    "up": f"ef({TOPK})",
    "sharded": f'ef({TOPK}, exchange="sharded")',
    "both": f'bidirectional({TOPK}, {TOPK}, selection="exact")',
    "down": f'bidirectional(identity, {TOPK}, selection="exact")',
}
LRS = {
    "cosine": lambda step: 0.05 * (1 + math.cos(math.pi * step / STEPS)),
    "steps": lambda step: 0.1 * 0.1 ** (step // 7),
    "0 at first, and again": lambda step: 0.1 * 0.5 ** (step % 7) if step % 7 else 0.0,
}


def gradient(w, rank):
    """The gradient of a quadratic of this rank, whose curvatures differ between entries."""
    noise = torch.Generator().manual_seed(rank)
    curvature, centre = torch.rand(2, D, generator=noise, dtype=torch.float64)
    return (curvature + 0.5) * (w - 10 * centre)


def start():
    return torch.linspace(-5, 5, D, dtype=torch.float64)


def top(a):
    """TopK(a): the K largest magnitudes, and zeros."""
    kept = a.abs().topk(K).indices
    return torch.zeros_like(a).index_copy_(0, kept, a[kept])


def thesis(method, lr):
    """Train as in Zou's thesis. Return w, the residuals eps of the workers, and delta.

    A step at learning rate 0 is left out: nothing that it sends could be applied.
    """
    w, delta = start(), torch.zeros(D, dtype=torch.float64)
    eps, applied = [torch.zeros(D, dtype=torch.float64) for _ in range(N)], 0.0
    for rate in filter(None, map(lr, range(STEPS))):
        a = [eps[q] + rate * gradient(w, q) for q in range(N)]
        sent = a if method == "down" else [top(each) for each in a]
        eps = [each - part for each, part in zip(a, sent, strict=True)]
        applied = applied + sum(rate * gradient(w, q) for q in range(N)) / N
        s = sum(sent) / N + delta
        step = s if method in ("up", "sharded") else top(s)
        delta = s - step
        w = w - step
    return w, eps, delta, applied


def slot(averager, name):
    """The residual of a slot in the unit of the update; zeros where the rank has none."""
    whole = torch.zeros(D, dtype=torch.float64)
    shard = averager.shape_of(("w",)).shards(N)[averager.exchange.rank]
    for _, part in averager.state.items(name):
        at = shard.start if name == "server_error" else 0
        whole[at : at + part.numel()] = part * averager.units.lrs["w"]
    return whole


@pytest.mark.parametrize("lr", LRS.values(), ids=LRS)
@pytest.mark.parametrize("method", METHODS)
def test_the_run_is_that_of_the_thesis(method, lr):
    def body(exchange):
        w = start()
        averager = torchcomp.Averager(METHODS[method], exchange, {"w": w})
        for step in range(STEPS):
            g = {"w": gradient(w, exchange.rank)}
            averager.average_all(g, lr=lr(step))
            w = w - lr(step) * g["w"]
        return w, slot(averager, "error"), slot(averager, "server_error")

    found = small.on_ranks(N, body)
    w, eps, delta, applied = thesis(method, lr)
    close = {"rtol": 0, "atol": 1e-12}
    for rank, (own, error, _) in enumerate(found):
        torch.testing.assert_close(own, w, **close)
        torch.testing.assert_close(error, eps[rank], **close)
    server = sum(each for _, _, each in found)
    torch.testing.assert_close(server, delta, **close)
    # Nothing is lost: w - mean eps - delta = w_0 - the sum of all averaged lr * g.
    unsent = sum(error for _, error, _ in found) / N + server
    torch.testing.assert_close(found[0][0] - unsent, start() - applied, **close)


# --- Several parameters, with learning rates of their own -----------------------------------------


def lrs_of(step):
    """Learning rates by parameter; that of "bias" is 0 in every third step."""
    ratio = {"conv": 1.0, "matrix": 0.1, "gain": 2.0, "empty": 1.0, "bias": float(step % 3 > 0)}
    return {name: each * 0.9**step for name, each in ratio.items()}


def lr_step(averager, step, lr, scale=1.0):
    """Run a step whose gradients have a loss scale. Return the means, without the scale."""
    tensors = small.gradients(step, averager.exchange.rank)
    scaled = {name: t * scale for name, t in tensors.items()}
    return {n: mean / scale for n, mean in small.step(averager, scaled, scale, lr)[1].items()}


def updates(averager, first, last, scale_of=lambda step: 1.0):
    """Run steps. Return the sum of lr * mean by parameter."""
    total = {name: torch.zeros_like(p) for name, p in averager.parameters.items()}
    for step in range(first, last):
        lrs = lrs_of(step)
        for name, mean in lr_step(averager, step, lrs, scale_of(step)).items():
            total[name] += lrs[name] * mean
    return total


def dense(*spans):
    """What dense training applies in spans of steps, each with a number of ranks."""
    return {
        name: sum(
            lrs_of(i)[name] * small.gradients(i, r)[name] / ranks
            for ranks, steps in spans
            for i in steps
            for r in range(ranks)
        )
        for name in small.parameters()
    }


def unsent(averager):
    """This rank's residuals, in the unit of the update."""
    units = averager.units
    return {
        name: residual * units.lrs.get(name, 0.0) / units.scale
        for name, residual in small.residual(averager).items()
    }


BOTH = "bidirectional(topk(0.3), topk(0.3))"
LOSSLESS = ["ef(topk(0.3))", 'ef(topk(0.3), exchange="sharded")', BOTH, "powersgd(rank=1)"]


@pytest.mark.parametrize("method", LOSSLESS)
def test_each_parameter_loses_nothing_at_its_own_learning_rate(method):
    def body(exchange):
        averager = small.averager(exchange, method)
        return updates(averager, 0, 9), unsent(averager)

    found = small.on_ranks(3, body)
    for name, expected in dense((3, range(9))).items():
        left = sum(rest[name] for _, rest in found) / 3
        torch.testing.assert_close(found[0][0][name] + left, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "method", [*LOSSLESS, 'bidirectional(topk(0.3), topk(0.3), selection="exact")']
)
def test_a_resumed_run_is_the_same_bit_for_bit_and_so_is_one_with_a_loss_scale(method):
    def body(exchange, loads, scale_of=lambda step: 1.0):
        averager = small.averager(exchange, method)
        updates(averager, 0, 4, scale_of)
        if loads:
            saved, averager = averager.state_dict(), small.averager(exchange, method, seed=5)
            averager.load_state_dict(saved)
        found = updates(averager, 4, 8, scale_of)
        return found, averager.state_dict()["slots"], averager.units.lrs

    plain, resumed = (small.on_ranks(2, lambda e, loads=each: body(e, loads)) for each in (0, 1))
    assert same(plain, resumed)
    if method != "powersgd(rank=1)":
        # Powers of two, so that scaling rounds nothing. The last is 1.
        scaled = small.on_ranks(2, lambda e: body(e, False, lambda step: 2.0 ** (3 - step // 2)))
        assert same(plain, scaled)


def test_other_ranks_and_another_method_lose_nothing():
    def first(exchange):
        averager = small.averager(exchange, BOTH)
        return updates(averager, 0, 4), averager.state_dict()

    before = small.on_ranks(3, first)
    states = torchcomp.redistribute([state for _, state in before], 2)

    def second(exchange):
        averager = small.averager(exchange, BOTH)
        averager.load_state_dict(states[exchange.rank])
        # "mean" has no residual: the next steps send what is left at the learning rates of then.
        averager.use("mean")
        return updates(averager, 4, 10)

    after = small.on_ranks(2, second)
    for name, expected in dense((3, range(4)), (2, range(4, 10))).items():
        applied = before[0][0][name] + after[0][name]
        torch.testing.assert_close(applied, expected, rtol=0, atol=1e-12)


def test_a_step_without_a_learning_rate_begins_anew():
    """The residual of such a step follows no earlier learning rate."""

    def body(exchange, first_lr):
        averager = small.averager(exchange, "ef(topk(0.3))")
        lr_step(averager, 0, first_lr)
        lr_step(averager, 1, None)
        return lr_step(averager, 2, 0.001), averager.units.lrs

    assert same(*(small.on_ranks(2, lambda e, lr=lr: body(e, lr)) for lr in (0.1, None)))


@pytest.mark.parametrize("late", [False, True])
def test_learning_rates_that_differ_between_ranks_are_found_in_any_step(late):
    def body(exchange):
        averager = small.averager(exchange, "ef(topk(0.3))", late=late)
        for step in range(2):
            lr_step(averager, step, 0.1)
        before = unsent(averager)
        lr = 0.1 if exchange.rank else 0.05
        error = caught(lambda: (lr_step(averager, 2, lr), averager.state_dict()))
        return error, averager.step, same(before, unsent(averager))

    for error, step, unchanged in small.on_ranks(2, body):
        assert type(error) is RankMismatchError
        assert "0.05" in str(error)
        assert "step 3" in str(error)
        assert step == 2
        assert unchanged


def test_the_comparison_takes_eight_bytes_of_the_message_that_ends_a_step():
    def body(exchange, lr):
        averager = small.averager(exchange, "ef(topk(0.3))")
        for step in range(2):
            lr_step(averager, step, lr)
        return averager.stats.control_bytes_sent

    assert small.on_ranks(3, lambda e: body(e, None)) == [2 * 2] * 3
    assert small.on_ranks(3, lambda e: body(e, 0.1)) == [2 * (2 + 8)] * 3
