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


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_seed_step_or_tensor_draws_other_numbers(other):
    assert shared(other) != shared(KEY)
    assert private(other) != private(KEY)


def test_only_private_draws_depend_on_the_rank():
    assert shared(replace(KEY, rank=7)) == shared(KEY)
    keys = [replace(KEY, rank=rank) for rank in range(20)]
    draws = [shared(KEY), *map(private, keys)]
    assert len({tuple(draw) for draw in draws}) == 21


def test_tensor_id_is_the_crc32_of_the_name():
    # The check value of CRC-32 from its specification: another implementation can then draw the
    # same numbers.
    assert tensor_id("123456789") == 0xCBF43926
    assert tensor_id("größe") != tensor_id("grösse")
    key = KEY.of_tensor("layer.weight")
    assert key == replace(KEY, tensor=tensor_id("layer.weight"))


def test_a_seed_is_a_number_of_63_bits():
    for seed in (0, 1, 2**32, 2**63 - 1, np.int64(3)):
        assert check_seed(seed) == seed
        assert type(check_seed(seed)) is int
        assert shared(Key(seed)) != shared(Key(int(seed) ^ 1))
    for seed in (-1, 2**63, 1.0, True, None, "7"):
        with pytest.raises(SpecError, match=rf"seed .* 0 .* 2\^63 - 1, .*{re.escape(repr(seed))}$"):
            check_seed(seed)
