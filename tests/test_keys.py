"""Keys: every random draw is a function of its key only, also if it is drawn one step ahead."""

import re
import threading
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from torchcomp.engine import host
from torchcomp.engine.draws import Ahead, Drawing
from torchcomp.engine.keys import Key, check_seed, tensor_id, uniform
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


# --- On an accelerator, random numbers are drawn one step ahead -----------------------------------

CPU = torch.device("cpu")


class Recorder:
    """Draws like `uniform`, and notes who drew which step."""

    def __init__(self) -> None:
        self.drew = {}
        self.ended = {step: threading.Event() for step in range(20)}

    def __call__(self, key: Key, count: int) -> np.ndarray:
        numbers = uniform(key, count)
        self.drew.setdefault(key.step, []).append(threading.current_thread())
        self.ended[key.step].set()
        return numbers


@pytest.fixture
def on_device(monkeypatch):
    monkeypatch.setattr(host, "can_read", lambda x: False)


def expected(key, count):
    return torch.from_numpy(uniform(key, count))


def test_the_next_step_is_drawn_by_a_thread_before_it_begins(on_device):
    draw = Recorder()
    ahead = Ahead()
    for step in range(4):
        key = Key(1, step=step, tensor=7, rank=2, ahead=ahead)
        assert Drawing(CPU)(draw, key, 5).equal(expected(key, 5))
        assert draw.ended[step + 1].wait(60)
    assert {step: len(threads) for step, threads in draw.drew.items()} == dict.fromkeys(range(5), 1)
    assert threading.current_thread() not in {t for threads in draw.drew.values() for t in threads}


def test_any_step_vector_seed_and_rank_has_numbers_of_its_own(on_device):
    draw, ahead = Recorder(), Ahead()
    for step in (3, 4, 9, 2, 3):
        for key in (Key(1), Key(2), Key(1, tensor=3), Key(1, rank=1)):
            now = Key(key.seed, step, key.tensor, key.rank, ahead)
            assert Drawing(CPU)(draw, now, 5).equal(expected(now, 5))
        if step == 9:
            ahead.clear()


def test_an_error_reaches_the_caller(on_device):
    for ahead in (None, Ahead()):
        key = Key(1, ahead=ahead)
        assert key == Key(1)
        with pytest.raises(MemoryError):
            Drawing(CPU)(mock.Mock(side_effect=MemoryError), key)
