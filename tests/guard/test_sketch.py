"""Sketches: linear, of the right norm on average, and as precise as they say."""

import math

import pytest
import torch

from torchcomp.guard.sketch import Sketch

CPU = torch.device("cpu")
WIDTH = 61
SEEDS = 400


def sketches(parts, seeds, width=WIDTH):
    """Return the squared norms of the sketches of each part: a row for each seed."""
    names, flat = [f"p{i}" for i in range(len(parts))], torch.cat(parts)
    sizes = [len(part) for part in parts]
    rows = [
        Sketch(names, sizes, width, seed, flat.dtype, CPU)(flat).square().sum(1)
        for seed in range(seeds)
    ]
    return torch.stack(rows)


def low_rank(rows, columns, rank=1):
    drawn = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, rank, generator=drawn).double() for n in (rows, columns))
    return (left @ right.T).flatten()


def drawn(size):
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).double()


# 4093 is the period of the signs; rows of 61 and 122 columns are multiples of the width.
VECTORS = {
    "normal": drawn(5000),
    "low rank": low_rank(64, 61),
    "low rank, as wide as two rows": low_rank(50, 122),
    "low rank, as wide as the period": low_rank(4, 4093),
    "rank 2": low_rank(33, 100, 2),
    "one large": torch.cat([drawn(3000) / 1e3, torch.ones(1).double()]),
    "constant": torch.ones(4093 * 2).double(),
}


def stated(vector):
    """Return the largest relative standard deviation that the docstring states."""
    padded = torch.nn.functional.pad(vector, (0, -len(vector) % WIDTH))
    shares = padded.view(-1, WIDTH).square().sum(0) / vector.square().sum()
    return math.sqrt(2 * shares.square().sum())


def test_squared_norms_are_unbiased_and_as_precise_as_stated():
    found = sketches(list(VECTORS.values()), SEEDS)
    for (name, vector), squares in zip(VECTORS.items(), found.T, strict=True):
        relative, deviation = squares / vector.square().sum(), stated(vector)
        assert relative.std() <= 1.15 * deviation, name
        # Four standard deviations of the mean.
        assert abs(relative.mean() - 1) < 4 * deviation / math.sqrt(SEEDS), name


@pytest.mark.parametrize("size", [0, 1, WIDTH - 1, WIDTH, WIDTH + 1])
def test_short_vectors_are_exact(size):
    vector = drawn(size)
    found = sketches([drawn(7), vector, drawn(100)], 3)[:, 1]
    expected = vector.square().sum().expand(3)
    if size <= WIDTH:
        torch.testing.assert_close(found, expected)
    else:
        assert float(found[0]) != float(expected[0])


@pytest.mark.parametrize("size", [0, 1, 4092, 4093, 4094, 8186])
def test_sketches_are_linear(size):
    sketch = Sketch(["a", "b"], [size, 10], WIDTH, 0, torch.float64, CPU)
    one, other = drawn(size + 10), drawn(size + 11)[:-1]
    assert sketch(one).shape == (2, WIDTH)
    torch.testing.assert_close(sketch(one - 3 * other), sketch(one) - 3 * sketch(other))
    assert not sketch.zeros().any()
    assert sketch.zeros().shape == (2, WIDTH)


def test_parts_of_a_bucket_do_not_mix():
    flat = drawn(300)
    whole = Sketch(["a", "b"], [100, 200], WIDTH, 0, torch.float64, CPU)(flat)
    flat[:100] = 0
    torch.testing.assert_close(
        Sketch(["a", "b"], [100, 200], WIDTH, 0, torch.float64, CPU)(flat)[1], whole[1]
    )
