"""Random numbers for an accelerator are drawn one step ahead, and are those of the host."""

import threading

import numpy as np
import pytest
import torch

from torchcomp.engine import host
from torchcomp.engine.draws import Ahead, Drawing
from torchcomp.engine.keys import Key, uniform

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


def test_the_host_draws_when_it_needs_numbers():
    draw = Recorder()
    assert Drawing(CPU)(draw, Key(1, step=4), 5).equal(expected(Key(1, step=4), 5))
    assert draw.drew == {4: [threading.current_thread()]}


def test_the_next_step_is_drawn_by_a_thread_before_it_begins(on_device):
    draw = Recorder()
    ahead = Ahead()
    for step in range(4):
        key = Key(1, step=step, tensor=7, rank=2, ahead=ahead)
        assert Drawing(CPU)(draw, key, 5).equal(expected(key, 5))
        assert draw.ended[step + 1].wait(60)
    assert {step: len(threads) for step, threads in draw.drew.items()} == dict.fromkeys(range(5), 1)
    assert threading.current_thread() not in {t for threads in draw.drew.values() for t in threads}


def test_a_run_can_continue_at_any_step(on_device):
    draw, ahead = Recorder(), Ahead()
    for step in (3, 4, 9, 2, 3):
        key = Key(1, step=step, ahead=ahead)
        assert Drawing(CPU)(draw, key, 5).equal(expected(key, 5))
        ahead.clear()


def test_vectors_seeds_and_ranks_have_numbers_of_their_own(on_device):
    keys = [Key(1), Key(2), Key(1, tensor=3), Key(1, rank=1)]
    draw, ahead = Recorder(), Ahead()
    for step in range(3):
        for key in keys:
            now = Key(key.seed, step, key.tensor, key.rank, ahead)
            assert Drawing(CPU)(draw, now, 5).equal(expected(now, 5))
            assert Drawing(CPU)(draw, now, 6).equal(expected(now, 6))


def test_an_error_reaches_the_caller(on_device):
    def fails(key: Key) -> np.ndarray:
        raise MemoryError

    for ahead in (None, Ahead()):
        with pytest.raises(MemoryError):
            Drawing(CPU)(fails, Key(1, ahead=ahead))


def test_a_key_is_the_same_with_and_without_draws_ahead():
    assert Key(1, 2, 3, 4, Ahead()) == Key(1, 2, 3, 4)
    assert Key(1, ahead="ahead").of_tensor("w").ahead == "ahead"
