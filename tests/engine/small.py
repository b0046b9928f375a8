"""Small tensors, averaged without a model by ranks that are threads of this process."""

import torch

import torchcomp
from tests.support.models import unsent_gradients
from tests.support.outcomes import same
from torchcomp import Averager
from torchcomp.engine.bucket import Bucket

GROUPS = (("bias", "conv", "empty"), ("matrix", "gain"))
"""Buckets that `partition` would not make for any size."""


def parameters(dtype=torch.float64):
    conv = torch.zeros(2, 3, 2, 2, dtype=dtype).to(memory_format=torch.channels_last)
    shapes = {"matrix": (7, 5), "bias": (6,), "gain": (), "empty": (0, 2)}
    return {"conv": conv, **{n: torch.zeros(shape, dtype=dtype) for n, shape in shapes.items()}}


def gradients(step, rank, dtype=torch.float64):
    """Gradients that differ between ranks and steps, with some zeros and ties."""
    noise = torch.Generator().manual_seed(1000 * step + rank)
    drawn = {}
    for name, parameter in parameters(dtype).items():
        values = torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
        drawn[name] = (values * 1024).round().div(1024).to(dtype)
    return drawn


def poisoned(step, rank, odd=torch.nan):
    """As :func:`gradients`, with an odd number on rank 1."""
    tensors = gradients(step, rank)
    if rank == 1:
        tensors["bias"][-1] = odd
    return tensors


def averager(exchange, method, *, dtype=torch.float64, groups=GROUPS, **options):
    return Averager(method, exchange, parameters(dtype), groups, **options)


def read(averager, tensors, groups=None):
    """Return the tensors as buckets, by default those of the current method."""
    return [Bucket.read(averager.shape_of(names), tensors) for names in groups or averager.buckets]


def step(averager, tensors, scale=1.0, lr=None, groups=None, **options):
    """Run one step. Return whether it counts, and the means by name."""
    averager.begin(scale, lr)
    buckets = read(averager, tensors, groups)
    for bucket in buckets:
        averager.average(bucket)
    counts = averager.finish(**options)
    return counts, {n: t.clone() for bucket in buckets for n, t in bucket.tensors().items()}


def train(averager, first, last, dtype=torch.float64):
    """Run steps `first` to `last` - 1. Return the means of each."""
    rank = averager.exchange.rank
    return [step(averager, gradients(i, rank, dtype))[1] for i in range(first, last)]


def residual(averager):
    """Return this rank's unsent gradients, with zeros for the parameters that have none."""
    found = unsent_gradients(averager.parameters, averager.state_dict())
    shapes = {name: p.shape for name, p in averager.parameters.items()}
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return zeros | found


def assert_conserved(books, tolerance=1e-12):
    """Require that the ranks applied equal means, and that no gradient is lost.

    Args:
        books: the result of :func:`book` on each rank.
        tolerance: largest absolute difference.
    """
    applied = books[0][1]
    assert all(same(book[1], applied) for book in books)
    for name in applied:
        dense = torch.stack([book[0][name] for book in books]).mean(0)
        unsent = torch.stack([book[2][name] for book in books]).mean(0)
        torch.testing.assert_close(applied[name] + unsent, dense, rtol=0, atol=tolerance)


def total(steps):
    """Return the sum of tensors by name, in float64."""
    return {name: sum(each[name].double() for each in steps) for name in steps[0]}


def book(averager, first, last, dtype=torch.float64):
    """Train for some steps. Return the sums of dense gradients and of means, and the residual."""
    rank = averager.exchange.rank
    dense = total([gradients(i, rank, dtype) for i in range(first, last)])
    return dense, total(train(averager, first, last, dtype)), residual(averager)


on_ranks = torchcomp.run_in_process
