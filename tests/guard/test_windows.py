"""Windows: each comparison sees a part of a large parameter, and several see all of it."""

import pytest
import torch

from torchcomp import Averager
from torchcomp.engine.bucket import BucketShape
from torchcomp.exchange import InProcessExchange
from torchcomp.guard.watch import MOST, BucketWatch

CPU = torch.device("cpu")
SIZES = {"a": 3, "b": 2 * MOST + 5, "c": 0, "d": MOST, "e": MOST + 1}
FILLED = [size for size in SIZES.values() if size]
SHAPE = BucketShape(tuple(SIZES), tuple((size,) for size in SIZES.values()), torch.float32)


def watching(number):
    """What watches a bucket, in the step of a comparison."""
    parameters = {name: torch.zeros(size) for name, size in SIZES.items()}
    averager = Averager("mean", InProcessExchange.alone(CPU), parameters)
    watch = BucketWatch(averager, averager.aggregator, SHAPE, CPU, 50)
    watch.before(torch.zeros(SHAPE.numel), number)
    return watch


def seen(number):
    """The elements of the bucket that a comparison sees, for each parameter with any."""
    windows = watching(number)._cut(torch.arange(SHAPE.numel))
    return torch.split(windows.long(), [min(size, MOST) for size in FILLED])


def test_a_window_is_a_part_of_its_parameter():
    first = 0
    for size, elements in zip(FILLED, seen(1), strict=True):
        assert elements[0] >= first
        assert elements[-1] < first + size
        assert torch.equal(elements, torch.arange(elements[0], elements[-1] + 1))
        first += size


def test_comparisons_one_after_another_see_every_element():
    found = torch.cat([elements for number in range(7, 10) for elements in seen(number)])
    assert torch.equal(found.unique(), torch.arange(SHAPE.numel))


def test_a_shard_is_placed_where_it_is_in_the_windows():
    flat, watch = torch.arange(1.0, SHAPE.numel + 1), watching(2)
    shards = [shard.span for shard in SHAPE.shards(3)]
    placed = [watch._cut(flat[span], span.start) for span in shards]
    assert torch.equal(torch.stack(placed).sum(0), watch._cut(flat))
    assert all(each.count_nonzero() for each in placed)


def test_estimates_are_scaled_to_the_whole_parameter():
    watch, ones = watching(4), torch.ones(SHAPE.numel)
    watch.before(ones, 4)
    rows, *_ = watch.after(ones, {}, 11)
    found = dict(watch.read(rows, 11))
    assert [each.gradients for each in found.values()] == pytest.approx(FILLED)
    assert [each.nonzero for each in found.values()] == pytest.approx(FILLED)
