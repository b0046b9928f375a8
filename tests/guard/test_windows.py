"""Windows: each comparison sees a part of a large parameter, and several see all of it."""

import torch

from torchcomp.bucket import BucketShape
from torchcomp.guard.windows import MOST, windows

SIZES = (3, 2 * MOST + 5, 0, MOST, MOST + 1)
SHAPE = BucketShape(tuple("abcde"), tuple((size,) for size in SIZES), torch.float32)
FILLED = (3, 2 * MOST + 5, MOST, MOST + 1)


def seen(number):
    """The elements of the bucket that a comparison sees, for each parameter with any."""
    part = windows(SHAPE, number)
    return torch.split(part.cut(torch.arange(SHAPE.numel)), list(part.sizes))


def test_a_window_is_a_part_of_its_parameter():
    part = windows(SHAPE, 1)
    assert part.whole == FILLED
    assert part.sizes == tuple(min(size, MOST) for size in FILLED)
    first = 0
    for size, elements in zip(FILLED, seen(1), strict=True):
        assert elements[0] >= first
        assert elements[-1] < first + size
        assert torch.equal(elements, torch.arange(elements[0], elements[-1] + 1))
        first += size


def test_comparisons_one_after_another_see_every_element():
    found = torch.cat([elements for number in range(7, 10) for elements in seen(number)])
    assert torch.equal(found.unique(), torch.arange(SHAPE.numel))


def test_estimates_are_scaled_to_the_whole_parameter():
    factors = windows(SHAPE, 4).factors(torch.device("cpu"))
    torch.testing.assert_close(
        factors, torch.tensor([1.0, (2 * MOST + 5) / MOST, 1.0, (MOST + 1) / MOST])
    )


def test_a_shard_is_placed_where_it_is_in_the_windows():
    flat, part = torch.arange(1.0, SHAPE.numel + 1), windows(SHAPE, 2)
    shards = [shard.span for shard in SHAPE.shards(3)]
    placed = [part.place(flat[span], span.start) for span in shards]
    assert torch.equal(torch.stack(placed).sum(0), part.cut(flat))
    assert all(each.count_nonzero() for each in placed)
