"""Guarded averagers on threads, and the gradients that they average."""

from dataclasses import replace

import torch

from tests.engine import small
from torchcomp import Guard, watch
from torchcomp.engine.bucket import Bucket

EVERY = 10


class Watched:
    """An averager of one rank with a guard, and what its callback was called with."""

    def __init__(self, exchange, method, *, dtype=torch.float32, guard=None, **options):
        self.alarms, self.dtype = [], dtype
        guard = replace(guard or Guard(every=EVERY, age=EVERY), callback=self.alarms.append)
        self.averager = small.averager(exchange, method, dtype=dtype, **options)
        self.guard = watch(self.averager, guard)

    def train(self, first, last):
        """Run steps `first` to `last` - 1, and judge the last comparison. Return the means."""
        means = small.train(self.averager, first, last, self.dtype)
        self.averager.settle()
        return means


def accuse(averager, name):
    """Let the guard believe that the method doubles a parameter. The run is right."""
    observer = averager.observers[0]
    after = observer.after

    def changed(bucket, method):
        if name in bucket.names:
            bucket = Bucket(bucket.shape, bucket.flat.clone())
            bucket.parts()[name].mul_(2).add_(1)
        after(bucket, method)

    observer.after = changed


def plain(alarm):
    """Return an alarm without its message, as a tuple."""
    return tuple(vars(replace(alarm, message="")).values())


def drifting(step, rank, dtype=torch.float32):
    """As `small.gradients`, with a part that is the same in all steps."""
    constant = small.gradients(10**6, 0, dtype)
    return {n: g.mul_(0.3).add_(constant[n]) for n, g in small.gradients(step, rank, dtype).items()}


def run(averager, first, last, gradients=drifting):
    """Run steps `first` to `last` - 1, and judge the last comparison."""
    for number in range(first, last):
        small.step(averager, gradients(number, averager.exchange.rank))
    averager.settle()
