"""Count what a block of code launches and what it waits for, on tensors of the CPU.

This sees whole steps of DDP and of optimizers. The device that tests.support.launches simulates has
no backward pass. Copies between host and device, and their waits, are not seen here.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.launches import WAITS, launches

# These read a tensor of the CPU without an operator.
_WAITING_METHODS = ("tolist", "numpy", "cpu", "__array__")


@dataclass
class Counts(TorchDispatchMode):
    """How often each operator that launches, and each one that waits, ran, by name."""

    launches: "Counter[str]" = field(default_factory=Counter)
    waits: "Counter[str]" = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        result = op(*args, **(kwargs or {}))
        if name in WAITS:
            self.waits[name] += 1
        elif op.namespace == "aten" and launches(op, name, result):
            self.launches[name] += 1
        return result


@contextmanager
def counted() -> Iterator[Counts]:
    """Count in one thread, with ranks of `with_fake_ranks`, whose collectives are no operators."""
    counts = Counts()

    # Not a TorchFunctionMode: torch turns it off in callbacks of the backward pass.
    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts.waits[name] += 1
            return call(*args, **kwargs)

        return counted

    with ExitStack() as stack:
        for name in _WAITING_METHODS:
            method = getattr(torch.Tensor, name)
            stack.enter_context(mock.patch.object(torch.Tensor, name, counting(name, method)))
        yield stack.enter_context(counts)
