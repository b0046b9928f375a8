"""Sketches: linear, of the right norm on average, and as precise as they say."""

import math

import pytest
import torch

from torchcomp.guard.watch import signs_of, sketch

CPU = torch.device("cpu")
WIDTH = 61
SEEDS = 400


def sketches(parts, seeds, width=WIDTH):
    """Return the squared norms of the sketches of each part: a row for each seed."""
    names, flat = [f"p{i}" for i in range(len(parts))], torch.cat(parts)
    sizes = [len(part) for part in parts]
    signs = [signs_of(tuple(names), tuple(sizes), seed, CPU) for seed in range(seeds)]
    rows = [sketch(flat, sizes, width, each).square().sum(1) for each in signs]
    return torch.stack(rows)


def low_rank(rows, columns, rank=1):
    drawn = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, rank, generator=drawn).double() for n in (rows, columns))
    return (left @ right.T).flatten()


def drawn(size):
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).double()


# Rows of 61 and 122 columns are multiples of the width.
VECTORS = {
    "normal": drawn(5000),
    "low rank": low_rank(64, 61),
    "low rank, as wide as two rows": low_rank(50, 122),
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


@pytest.mark.parametrize("size", [1, WIDTH - 1, WIDTH, WIDTH + 1])
def test_short_vectors_are_exact(size):
    vector = drawn(size)
    found = sketches([drawn(7), vector, drawn(100)], 3)[:, 1]
    expected = vector.square().sum().expand(3)
    if size <= WIDTH:
        torch.testing.assert_close(found, expected)
    else:
        assert float(found[0]) != float(expected[0])


@pytest.mark.parametrize("size", [1, WIDTH, 4093])
def test_sketches_are_linear_and_parts_of_a_bucket_do_not_mix(size):
    sizes = [size, 10]
    signs = signs_of(("a", "b"), tuple(sizes), 0, CPU)

    def of(values):
        return sketch(values, sizes, WIDTH, signs)

    one, other = drawn(size + 10), drawn(size + 11)[:-1]
    assert of(one).shape == (2, WIDTH)
    torch.testing.assert_close(of(one - 3 * other), of(one) - 3 * of(other))
    whole = of(one)
    one[:size] = 0
    torch.testing.assert_close(of(one)[1], whole[1])
    assert not of(one)[0].any()
