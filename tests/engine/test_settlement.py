"""Settlement: whether the last step counts, whatever the reason to doubt it."""

import threading

import pytest

from torchcomp.engine.settlement import Status, Steps


@pytest.fixture
def steps():
    """A sequence with one step in flight."""
    steps = Steps()
    steps.status = Status.IN_FLIGHT
    return steps


def test_a_step_in_flight_is_not_decided(steps):
    steps.decide()
    assert (steps.status, steps.step) == (Status.IN_FLIGHT, 0)


@pytest.mark.parametrize("counts", [True, False])
def test_without_a_reason_a_step_is_decided_when_it_ends(steps, counts):
    steps._end(counts, ())
    assert steps.status is (Status.COUNTED if counts else Status.TAKEN_BACK)
    assert steps.step == 1


@pytest.mark.parametrize("answers", [(True,), (False,), (True, False), (False, True), (True, True)])
def test_it_counts_if_all_reasons_agree(steps, answers):
    asked = []
    steps._end(True, tuple(lambda each=each: asked.append(each) or each for each in answers))
    assert steps.undecided
    assert asked == []
    for _ in range(2):  # decided once
        steps.decide()
        assert steps.counted == all(answers)
        assert steps.step == all(answers)


def test_what_a_reason_raises_takes_the_step_back(steps):
    def reason():
        raise ValueError("wrong")

    steps._end(True, (reason,))
    with pytest.raises(ValueError, match="wrong"):
        steps.decide()
    assert (steps.status, steps.step) == (Status.TAKEN_BACK, 0)


def test_a_step_that_was_discarded_while_a_reason_was_asked_is_left_alone(steps):
    def reason():
        steps._discard()  # such as a checkpoint that another thread loads
        return False

    steps._end(True, (reason,))
    steps.decide()
    assert steps.step == 1


def test_two_threads_decide_once(steps):
    asking, go = threading.Event(), threading.Event()

    def reason():
        asking.set()
        assert go.wait(60)
        return False

    steps._end(True, (reason,))
    threads = [threading.Thread(target=steps.decide) for _ in range(2)]
    threads[0].start()
    assert asking.wait(60)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join()
    assert steps.step == 0
