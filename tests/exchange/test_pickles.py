"""Steps exchange tensors only: pickled objects are for registration, errors and gathered states."""

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import torchcomp
from tests.support.models import THROUGH_DDP, loss_of, mlp, rows, wrap
from tests.support.ranks import on_threads

TOPK = "ef(topk(0.1))"
Make = Callable[[Any, Any], Any]


def registered(spec: str, **options: Any) -> Make:
    return lambda model, _: torchcomp.register(model, spec, **options)


def local(**options: Any) -> Make:
    return lambda model, optimizer: torchcomp.LocalSGD(
        model, optimizer, "every(2)", total_steps=100, **options
    )


def sampled(selection: str) -> Make:
    return lambda model, _: torchcomp.JointSpar(
        model, budget=0.5, compress=TOPK, selection=selection
    )


# The number of ranks, and what makes a way to train.
FAMILIES: list[tuple[int, Make]] = [
    *((2, registered(spec)) for spec in THROUGH_DDP),
    (4, registered(TOPK, nodes=2)),
    (2, local()),
    (2, local(overlap=True)),
    (2, local(compress=TOPK, outer="slowmo(beta=0.7)")),
    *((2, sampled(selection)) for selection in ("shared", "per-rank")),
]


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Note the name of every function that is called to send objects or to read a pickle."""
    calls: list[str] = []
    names = [(dist, name) for name in dir(dist) if "object" in name and name[0] != "_"]

    def spy(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            # Numba reads compiled kernels from the disk, when they are first used.
            if not sys._getframe(1).f_globals["__name__"].startswith("numba"):
                calls.append(name)
            return function(*args, **options)

        return noted

    with contextlib.ExitStack() as patches:
        for owner, name in [*names, (pickle, "loads"), (pickle, "load")]:
            function = getattr(owner, name)
            patches.enter_context(mock.patch.object(owner, name, spy(name, function)))
        yield calls


def in_steps(make: Make, calls: list[str]) -> list[str]:
    """Return the calls in steps 3 to 5; the first steps compare the ranks."""
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    source = make(model, optimizer)
    for step in range(5):
        if step == 2:
            dist.barrier()
            before = len(calls)
        optimizer.zero_grad()
        loss_of(model(rows(step))).backward()
        optimizer.step()
    dist.barrier()
    after = calls[before:]
    source.close()
    return after


def test_no_step_exchanges_objects() -> None:
    with counted() as calls:
        for ranks, make in FAMILIES:
            assert on_threads(ranks, in_steps, make, calls) == [[]] * ranks
        assert calls  # registration does
