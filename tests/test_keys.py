"""Keys: every random draw is a function of its key only."""

import re
from dataclasses import replace

import numpy as np
import pytest

from torchcomp.engine.keys import Key, check_seed, tensor_id
from torchcomp.specs.errors import SpecError

KEY = Key(seed=5, step=2, tensor=9, rank=1)
OTHERS = {
    "seed": replace(KEY, seed=6),
    "large seed": replace(KEY, seed=5 + 2**32),
    "step": replace(KEY, step=3),
    "tensor": replace(KEY, tensor=10),
}


def shared(key):
    return key.shared().integers(2**63, size=4).tolist()


def private(key):
    return key.private().integers(2**63, size=4).tolist()


def test_same_key_draws_the_same_numbers():
    assert shared(KEY) == shared(replace(KEY))
    assert private(KEY) == private(replace(KEY))


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_seed_step_or_tensor_draws_other_numbers(other):
    assert shared(other) != shared(KEY)
    assert private(other) != private(KEY)


def test_shared_draws_do_not_depend_on_the_rank():
    assert shared(replace(KEY, rank=7)) == shared(KEY)


def test_private_draws_differ_between_ranks_and_from_the_shared_ones():
    keys = [replace(KEY, rank=rank) for rank in range(20)]
    draws = [shared(KEY), *map(private, keys)]
    assert len({tuple(draw) for draw in draws}) == 21


def test_private_draws_of_ranks_are_not_correlated():
    draws = [replace(KEY, rank=rank).private().standard_normal(20_000) for rank in range(4)]
    correlation = np.corrcoef(draws) - np.eye(4)
    # The sample correlation of independent draws is normal with deviation 1 / sqrt(20,000).
    assert np.abs(correlation).max() < 5 / 20_000**0.5


def test_every_generator_of_a_key_starts_at_the_same_state():
    first = KEY.shared()
    first.random(10)
    assert shared(KEY) == Key(5, 2, 9).shared().integers(2**63, size=4).tolist()


def test_of_tensor_changes_only_the_tensor():
    key = KEY.of_tensor("layer.weight")
    assert replace(key, tensor=9) == KEY
    assert key.tensor == tensor_id("layer.weight")


def test_tensor_id_is_the_crc32_of_the_name():
    # The check value of CRC-32 from its specification: another implementation can then draw the
    # same numbers.
    assert tensor_id("123456789") == 0xCBF43926
    assert tensor_id("größe") != tensor_id("grösse")


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1])
def test_seed_in_range_is_accepted(seed):
    assert check_seed(seed) == seed
    assert shared(Key(seed)) != shared(Key(seed ^ 1))


def test_seed_of_numpy_becomes_one_of_python():
    assert type(check_seed(np.int64(3))) is int


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, None, "7"])
def test_seed_out_of_range_is_refused(seed):
    with pytest.raises(SpecError, match=rf"seed .* 0 .* 2\^63 - 1, .*{re.escape(repr(seed))}$"):
        check_seed(seed)
