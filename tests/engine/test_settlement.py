"""Settlement: whether the last step counts, whatever the reason to doubt it."""

import threading

import pytest

from torchcomp.settlement import Settlement, Status


class Step:
    """A step whose state can be taken back."""

    def __init__(self):
        self.taken_back = 0
        self.settlement = Settlement(threading.RLock())

    def undo(self):
        self.taken_back += 1
        self.settlement.discard()


@pytest.fixture
def step():
    step = Step()
    step.settlement.begin()
    return step


def test_a_step_in_flight_is_not_decided(step):
    step.settlement.ask(step.undo)
    assert step.settlement.status is Status.IN_FLIGHT
    assert step.taken_back == 0


def test_without_a_reason_a_step_counts_when_it_ends(step):
    step.settlement.end()
    assert step.settlement.status is Status.COUNTED


@pytest.mark.parametrize("answers", [(True,), (False,), (True, False), (False, True), (True, True)])
def test_it_counts_if_all_reasons_agree(step, answers):
    asked = []
    step.settlement.end(
        *(lambda answer=answer: asked.append(answer) or answer for answer in answers)
    )
    assert step.settlement.status is Status.OPEN
    assert asked == []
    step.settlement.ask(step.undo)
    counts = all(answers)
    assert step.settlement.status is (Status.COUNTED if counts else Status.TAKEN_BACK)
    assert step.taken_back == (not counts)
    step.settlement.ask(step.undo)  # decided once
    assert step.taken_back == (not counts)


def test_what_a_reason_raises_takes_the_step_back(step):
    def reason():
        raise ValueError("wrong")

    step.settlement.end(reason)
    with pytest.raises(ValueError, match="wrong"):
        step.settlement.ask(step.undo)
    assert step.settlement.status is Status.TAKEN_BACK
    assert step.taken_back == 1


def test_a_step_that_was_discarded_while_a_reason_was_asked_is_left_alone(step):
    def reason():
        step.settlement.discard()  # such as a checkpoint that another thread loads
        return False

    step.settlement.end(reason)
    step.settlement.ask(step.undo)
    assert step.taken_back == 0


def test_two_threads_decide_once(step):
    asking, go = threading.Event(), threading.Event()

    def reason():
        asking.set()
        assert go.wait(60)
        return False

    step.settlement.end(reason)
    threads = [threading.Thread(target=step.settlement.ask, args=(step.undo,)) for _ in range(2)]
    threads[0].start()
    assert asking.wait(60)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join()
    assert step.taken_back == 1
