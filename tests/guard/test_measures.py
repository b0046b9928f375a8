"""What one rank measures: windows of large parameters, and their sketches."""

import math

import pytest
import torch

from tests.support.vectors import normal
from torchcomp import Averager
from torchcomp.engine.bucket import BucketShape
from torchcomp.exchange import InProcessExchange
from torchcomp.guard.watch import MOST, BucketWatch, signs_of, sketch

CPU = torch.device("cpu")

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


def test_estimates_are_scaled_to_the_whole_parameter():
    ones = torch.ones(LARGE.numel)
    watch = watching(4, ones)
    rows, *_ = watch.after(ones, {}, 11)
    found = dict(watch.read(rows, 11))
    assert [each.gradients for each in found.values()] == pytest.approx(FILLED)
    assert [each.nonzero for each in found.values()] == pytest.approx(FILLED)


WIDTH, SEEDS = 61, 400


def drawn(size):
    return normal(size, dtype=torch.float64, seed=size)


# Rows of 122 columns are a multiple of the width. Short vectors are exact.
VECTORS = {
    "normal": drawn(5000),
    "low rank, as wide as two rows": torch.outer(drawn(50), drawn(122)).flatten(),
    "one large": torch.cat([drawn(3000) / 1e3, torch.ones(1).double()]),
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
