"""The simulation of a step, against cases that were computed by hand."""

import pytest
import torch

from torchcomp.advisor import Compute, Link, Recording, simulate, simulate_alone
from torchcomp.advisor.collectives import ALL_REDUCE, ALL_TO_ALL
from torchcomp.advisor.simulation import Call, Submitted, Work
from torchcomp.engine.bucket import BucketShape
from torchcomp.specs.errors import SpecError


class Fixed:
    """Collectives that take `nbytes` seconds, and a share of a core."""

    def __init__(self, cpu=0.0):
        self.share = cpu

    def seconds(self, kind, nbytes):
        return nbytes

    def cpu(self, kind, nbytes):
        return self.share * self.seconds(kind, nbytes)


def reduce(seconds):
    return Call(ALL_REDUCE, seconds)


def step(*buckets, ready, backward=10.0, total=12.0):
    """A recording and a computation, from the activities of each bucket."""
    names = [(f"p{i}",) for i in range(len(buckets))]
    submitted = list(map(Submitted, names, buckets))
    return Recording("m", tuple(submitted)), Compute(tuple(names), ready, backward, total)


# The backward pass ends after 10 s, the optimizer takes 2.
@pytest.mark.parametrize(
    ("buckets", "ready", "options", "seconds"),
    [
        # Hidden: 4 to 7.
        ([(reduce(3.0),)], (4.0,), {}, 12.0),
        # The second waits for the first: 4 to 9, 9 to 14.
        ([(reduce(5.0),), (reduce(5.0),)], (4.0, 6.0), {}, 16.0),
        # Encoding shares the core with the backward pass: both are half as fast until 8. Then 3 s
        # of collective, which needs no core; the last 2 s of work run beside what is left of the
        # backward pass: it has 1 s at 11 and ends at 13, the work at 14.
        ([(Work(2.0), reduce(3.0), Work(2.0))], (4.0,), {}, 16.0),
        # Two ranks on a core: 20 s of backward pass, which hide the 3 s; 4 s of optimizer.
        ([(reduce(3.0),)], (4.0,), {"cores": 0.5}, 24.0),
        # A second core takes the encoding.
        ([(Work(2.0),)], (4.0,), {"cores": 2}, 12.0),
        # Ranks that encode twice as fast: 1 s of work.
        ([(Work(2.0),)], (10.0,), {"speedup": 2.0}, 13.0),
        # A collective that needs a quarter of a core: from 4 to 8 the backward pass runs at 3/4 and
        # does 3 of its last 6 s; it ends at 11.
        ([(reduce(4.0),)], (4.0,), {"cpu": 0.25}, 13.0),
    ],
)
def test_a_step_by_hand(buckets, ready, options, seconds):
    recording, compute = step(*buckets, ready=ready)
    cores = options.get("cores", 1)
    times, speedup = Fixed(options.get("cpu", 0.0)), options.get("speedup", 1.0)
    found = simulate(recording, compute, times, cores=cores, speedup=speedup)
    assert found.seconds == pytest.approx(seconds)
    alone = 12.0 / min(1, cores)
    assert found.compute == alone
    assert found.utilisation == pytest.approx(alone / seconds)


def test_work_of_the_hook_delays_the_backward_pass():
    names = (("p",),)
    recording = Recording("bf16", (Submitted(names[0], (reduce(1.0),), work=0.5),))
    found = simulate(recording, Compute(names, (10.0,), 10.0, 12.0), Fixed())
    assert found.seconds == pytest.approx(13.5)


def test_local_steps_wait_for_their_average():
    recording, _ = step((Work(1.0), reduce(3.0), Work(2.0)), ready=(0.0,))
    assert simulate_alone(recording, Fixed()) == pytest.approx(6.0)
    assert simulate_alone(recording, Fixed(), cores=0.5) == pytest.approx(9.0)


def test_ready_times_by_elements():
    shapes = [BucketShape((name,), ((n,),), torch.float32) for name, n in (("a", 100), ("b", 300))]
    # The backward pass is from 3 to 9.6 s.
    compute = Compute.by_elements(shapes, 10.0)
    assert compute.buckets == (("a",), ("b",))
    assert (*compute.ready, compute.backward, compute.total) == pytest.approx((4.65, 9.6, 9.6, 10))


def test_a_faster_or_nearer_link_never_makes_a_step_longer():
    done = (Work(0.01), Call(ALL_TO_ALL, 10**6), Work(0.02), reduce(10**6), Work(0.01))
    recording, compute = step(done, done, done, ready=(0.03, 0.05, 0.09), backward=0.1, total=0.11)

    def seconds(gbit, latency):
        times = Link(gbit, latency_us=latency, backend="gloo").among(8)
        return simulate(recording, compute, times).seconds

    grid = [[seconds(g, us) for g in (0.01, 0.1, 1, 3, 10, 100)] for us in (0, 10, 100, 1000)]
    for row in grid:
        assert row == sorted(row, reverse=True)
    for column in zip(*grid, strict=True):
        assert list(column) == sorted(column)
    assert grid[0][-1] < grid[-1][0]


def test_a_recording_of_other_buckets_is_refused():
    recording, _ = step((reduce(1.0),), ready=(4.0,))
    with pytest.raises(SpecError):
        simulate(recording, Compute((("other",),), (1.0,), 2.0, 3.0), Fixed())
