"""The part of a step that hides an exchange: what was measured, by the rule of the step model."""

import pytest

from torchcomp.advisor.auto import Choice, Hidden
from torchcomp.advisor.moments import Moment

BUCKETS = 3


def moments(*pairs):
    """Moments on the host's clock, each with the seconds of work until then."""
    return [Moment(host, work) for host, work in pairs]


def hidden(cores=1.0):
    """A backward pass from 3 to 6 with a bucket each second, in a step of 8 seconds."""
    step = [(at, cores * at) for at in (0.0, 4.0, 5.0, 6.0, 6.0)]
    return Hidden([moments(*step, (8.0, 8.0))] * 3)


def exchanges(seconds, work=0.0):
    """The moments of exchanges of which each bucket takes so long."""
    return [moments(*((n * seconds, n * work) for n in range(BUCKETS + 1)))] * 3


@pytest.mark.parametrize(
    ("cores", "seconds", "work", "step"),
    [
        # Buckets are exchanged one after another while the backward pass goes on.
        (1.0, 0.0, 0.0, 6.0),
        (1.0, 0.5, 0.0, 6.5),  # only the last bucket's is seen
        (1.0, 2.0, 0.0, 10.0),  # from the first bucket on, one follows another
        # Work competes with the computation of gradients.
        (1.0, 1.0, 1.0, 9.0),  # nothing hides work
        (4.0, 1.0, 1.0, 7.5),  # it delays each bucket by a quarter, and the last one is seen
        (0.25, 1.0, 0.25, 7.5),  # other programs had the core for most of the time
    ],
)
def test_what_a_backward_pass_hides(cores, seconds, work, step):
    assert hidden(cores).step_with(exchanges(seconds, work)) == pytest.approx(step)


def test_a_choice_says_what_was_measured_and_proposes_local_steps():
    seconds = {"mean": 0.2, "powersgd(1)": 0.1}
    text = str(Choice("powersgd(1)", seconds, alone=0.05, average=0.16, step=96))
    for part in ("step 97", "powersgd(1)", "2.00 times", "200 ms", "100 ms", "every(8)", "70 ms"):
        assert part in text
    text = str(Choice("mean", seconds | {"powersgd(1)": 0.196}, 0.19, 0.16, 96))
    assert "1.02" in text
    assert "every(8)" not in text
