"""What a comparison sends: when, and who waits for it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.engine import small
from tests.guard.runs import Watched
from tests.support.patience import PATIENCE
from torchcomp import Guard, RankFailureError
from torchcomp.exchange import InProcessExchange

TOPK = "ef(topk(0.1))"
ALWAYS = Guard(every=1)


class Slow(InProcessExchange):
    """The exchange of one rank whose sums arrive when the test says so."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.started, self.lost = 0, False  # sums on their way; whether another rank is lost
        self.is_awaited, self.arrive = threading.Event(), threading.Event()

    def sum_control(self, numbers):
        self.started += 1

        def wait():
            self.is_awaited.set()
            if not self.arrive.wait(PATIENCE) or self.lost:
                raise RankFailureError("lost")
            return numbers

        return wait


@pytest.fixture
def exchange():
    return Slow.alone(torch.device("cpu"))


def train(watched, number):
    return small.step(watched.averager, small.gradients(number, 0, torch.float32))[0]


def test_a_step_ends_while_its_comparison_is_on_its_way(exchange):
    watched = Watched(exchange, TOPK, guard=ALWAYS)
    assert train(watched, 0)
    assert exchange.started == 1
    assert not exchange.is_awaited.is_set()
    assert watched.guard.report is None
    exchange.arrive.set()
    watched.averager.settle()
    assert watched.guard.report.step == 1


def test_other_threads_do_not_wait_for_it(exchange):
    watched = Watched(exchange, TOPK, guard=ALWAYS)
    train(watched, 0)
    with ThreadPoolExecutor(2) as pool:
        settled = pool.submit(watched.averager.settle)
        assert exchange.is_awaited.wait(PATIENCE)
        norms = pool.submit(watched.averager.residual_norms).result(PATIENCE)
        assert norms["matrix"] > 0
        pool.submit(watched.averager.abandon, 0).result(PATIENCE)
        exchange.arrive.set()
        settled.result(PATIENCE)
    assert watched.averager.step == 0
    assert watched.guard.report is None, "the step was taken back"


def test_a_lost_rank_is_named_by_the_next_call_and_the_comparison_is_discarded(exchange):
    watched = Watched(exchange, TOPK, guard=ALWAYS)
    train(watched, 0)
    exchange.lost = True
    exchange.arrive.set()
    with pytest.raises(RankFailureError):
        watched.averager.begin()
    watched.averager.settle()
    assert watched.averager.step == 1
    assert watched.guard.report is None
