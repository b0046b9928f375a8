"""On a simulated device: the guard waits in no step, and reads its result when the next begins."""

import pytest
import torch

from tests.engine import small
from tests.support.cases import thorough
from tests.support.launches import EchoExchange, counted, on_device
from torchcomp import Averager, Guard, watch

METHODS = ["mean", "ef(topk(0.3))"]
MORE = ['ef(cast("fp16"))', "dgc(topk(0.3))", "powersgd(rank=1)"]


class Run:
    """Steps of an averager on the simulated device, with or without a guard."""

    def __init__(self, method, count, guard):
        parameters = {name: on_device(p) for name, p in small.parameters(torch.float32).items()}
        self.averager = Averager(method, EchoExchange(2, count), parameters, small.GROUPS)
        if guard is not None:
            watch(self.averager, guard, parameters)
        self.count = count

    def step(self, number):
        """Return the waits when a step begins, and those of the rest of it."""
        drawn = small.gradients(number, 0, torch.float32)
        tensors = {name: on_device(g) for name, g in drawn.items()}
        self.count.reset()
        self.averager.begin()
        at_first = self.count.take().waits
        for bucket in small.read(self.averager, tensors):
            self.averager.average(bucket)
        assert self.averager.finish()
        return at_first, self.count.waits


@pytest.mark.parametrize("method", [*METHODS, *thorough(MORE)])
def test_only_the_beginning_of_a_step_waits_for_a_comparison(method):
    guard = Guard(every=3, callback=lambda alarm: None)
    with counted() as count:
        found = {}
        for options in (None, guard):
            run = Run(method, count, options)
            # The first step compares the ranks.
            found[options] = [run.step(number) for number in range(8)][1:]
    assert [rest for _, rest in found[guard]] == [rest for _, rest in found[None]]
    waits = [more - less for (more, _), (less, _) in zip(found[guard], found[None], strict=True)]
    # For the sums, and for the digest of the replicas. These ranks are fake, so the first
    # comparison raises an alarm that lasts: the ranks are compared once.
    assert waits == [0, 0, 4, 0, 0, 2, 0]
    assert run.averager.observers[0].alarms


@pytest.mark.parametrize(
    ("method", "reads"), [("mean", 0), ("ef(topk(0.3))", 4), ("dgc(topk(0.3))", 6)]
)
def test_in_most_steps_a_bucket_takes_a_launch_for_each_of_its_values(method, reads):
    steps, launches = 10, []
    with counted() as count:
        for options in (None, Guard(every=1000)):
            run = Run(method, count, options)
            run.step(0)
            before = 0
            for number in range(1, 1 + steps):
                run.step(number)  # counts from its second part on
                before += count.launches
            launches.append(before)
    assert launches[1] - launches[0] == reads * steps * len(small.GROUPS)
