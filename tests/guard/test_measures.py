"""What one rank measures: windows of large parameters, their sketches, and elements followed."""

import math

import pytest
import torch

from tests.support.vectors import normal
from torchcomp import Averager
from torchcomp.aggregators import Law
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.state import Kind, Slot
from torchcomp.exchange import InProcessExchange
from torchcomp.guard.report import SAMPLED
from torchcomp.guard.watch import MOST, BucketWatch, Samples, signs_of, sketch

CPU = torch.device("cpu")

# --- Windows --------------------------------------------------------------------------------------

SIZES = {"a": 3, "b": 2 * MOST + 5, "c": 0, "d": MOST, "e": MOST + 1}
FILLED = [size for size in SIZES.values() if size]
LARGE = BucketShape(tuple(SIZES), tuple((size,) for size in SIZES.values()), torch.float32)


def watching(number, values):
    """What watches a bucket, in the step of a comparison."""
    parameters = {name: torch.zeros(size) for name, size in SIZES.items()}
    averager = Averager("mean", InProcessExchange.alone(CPU), parameters)
    watch = BucketWatch(averager, averager.aggregator, LARGE, torch.zeros(0), 50)
    watch.before(values, number)
    return watch


def test_comparisons_one_after_another_see_every_element():
    elements = torch.arange(float(LARGE.numel))
    found = torch.cat([watching(number, elements)._cut(elements) for number in range(7, 10)])
    assert torch.equal(found.unique(), elements)


def test_a_shard_is_placed_where_it_is_in_the_windows():
    flat = torch.arange(1.0, LARGE.numel + 1)
    watch = watching(2, flat)
    shards = [shard.span for shard in LARGE.shards(3)]
    placed = [watch._cut(flat[span], span.start) for span in shards]
    assert torch.equal(torch.stack(placed).sum(0), watch._cut(flat))
    assert all(each.count_nonzero() for each in placed)


def test_estimates_are_scaled_to_the_whole_parameter():
    ones = torch.ones(LARGE.numel)
    watch = watching(4, ones)
    rows, *_ = watch.after(ones, {}, 11)
    found = dict(watch.read(rows, 11))
    assert [each.gradients for each in found.values()] == pytest.approx(FILLED)
    assert [each.nonzero for each in found.values()] == pytest.approx(FILLED)


# --- Sketches -------------------------------------------------------------------------------------

WIDTH, SEEDS = 61, 400


def drawn(size):
    return normal(size, dtype=torch.float64, seed=size)


def low_rank(rows, columns):
    return torch.outer(drawn(rows), drawn(columns)).flatten()


# Rows of 61 and 122 columns are multiples of the width. Short vectors are exact.
VECTORS = {
    "normal": drawn(5000),
    "low rank": low_rank(64, 61),
    "low rank, as wide as two rows": low_rank(50, 122),
    "one large": torch.cat([drawn(3000) / 1e3, torch.ones(1).double()]),
    "constant": torch.ones(4093 * 2).double(),
    "short": drawn(WIDTH),
}


def stated(vector):
    """Return the largest relative standard deviation that the docstring states."""
    padded = torch.nn.functional.pad(vector, (0, -len(vector) % WIDTH))
    shares = padded.view(-1, WIDTH).square().sum(0) / vector.square().sum()
    return math.sqrt(2 * shares.square().sum())


def test_squared_norms_are_unbiased_and_as_precise_as_stated():
    names, sizes = tuple(VECTORS), tuple(map(len, VECTORS.values()))
    flat = torch.cat(list(VECTORS.values()))
    rows = [sketch(flat, sizes, WIDTH, signs_of(names, sizes, s, CPU)) for s in range(SEEDS)]
    found = torch.stack([each.square().sum(1) for each in rows])
    for (name, vector), squares in zip(VECTORS.items(), found.T, strict=True):
        relative, deviation = squares / vector.square().sum(), stated(vector)
        assert relative.std() <= 1.15 * deviation, name
        # Four standard deviations of the mean.
        assert abs(relative.mean() - 1) < 4 * deviation / math.sqrt(SEEDS), name
    torch.testing.assert_close(found[:, -1], VECTORS["short"].square().sum().expand(SEEDS))


# --- Samples --------------------------------------------------------------------------------------

SHAPE = BucketShape(("a", "none", "b"), ((4,), (0,), (2,)), torch.float32)
NUMEL = 6
ERROR = Law(before={"error": -1.0}, after={"error": 1.0})


def samples(dtype=torch.float32, law=ERROR, shape=SHAPE):
    names = dict.fromkeys(name for name, _, _ in law.terms())
    slots = {name: Slot(name, Kind.DEBT, shape.names, shape.sizes, dtype) for name in names}
    return Samples(shape, law, slots, slice(0, 0), CPU)


def step(followed, found, gradient, *, sent=(), applied=None):
    """Follow a step of error feedback that sends `sent`. Return the residual that it leaves."""
    left = (found + gradient.to(found.dtype)).index_fill(0, torch.tensor(sent).long(), 0)
    mean = torch.zeros(len(found)).index_fill(0, torch.tensor(sent).long(), 1.0)
    followed.before(gradient)
    followed.after(mean if applied is None else applied, {"error": (found, left)}, {})
    return left


def ages(followed):
    followed.take(1)
    return followed._ages.tolist()


def changed(followed):
    return followed.take(1)[2].tolist()


def test_values_that_enter_the_residual_with_factors():
    law = Law(gradient=1.9, before={"error": -1.0, "momentum": -0.81}, after={"error": 1.0})
    followed = samples(law=law)
    gradient, error, momentum = (normal(NUMEL, seed=seed) for seed in range(3))
    left = 1.9 * gradient + error + 0.81 * momentum
    left[4] *= 0.9
    followed.before(gradient)
    slots = {"error": (error, left), "momentum": (momentum, momentum)}
    followed.after(torch.ones(NUMEL), slots, {})
    assert ages(followed) == [1, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("steps", [2, 3, 20])
def test_steps_are_evaluated_together_as_one_by_one(steps):
    found = []
    for most in (1, steps):
        followed, residual = samples(), torch.zeros(NUMEL)
        followed._most, counts = most, []
        for number in range(20):
            sent = torch.randperm(NUMEL, generator=torch.Generator().manual_seed(number))[:1]
            gradient = normal(NUMEL, seed=number) * (number % 5 > 0)
            left = step(followed, residual, gradient, sent=sent.tolist())
            residual = left if number % 8 else normal(NUMEL, seed=number)
            if number in (9, 10):
                followed.undo(["a"])
                counts.append(followed.take(2))
        found.append([ages(followed), torch.stack(counts).tolist(), changed(followed)])
    assert found[0] == found[1]
    assert len(set(found[0][0])) > 2


def test_of_a_large_parameter_all_ranks_and_buckets_follow_the_same_elements():
    large = BucketShape(("x", "y"), ((10_000,), (5,)), torch.float32)
    other = BucketShape(("y", "x"), ((5,), (10_000,)), torch.float32)
    one, two = samples(shape=large), samples(shape=other)
    assert len(one._at) == SAMPLED + 5
    assert (one._at[:SAMPLED] + 5).tolist() == two._at[5:].tolist()
    assert one._owner.tolist() == [0] * SAMPLED + [1] * 5
