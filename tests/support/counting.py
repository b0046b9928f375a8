"""Count what a block of code launches and what it waits for, on tensors of the CPU."""

import collections
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING_OPERATORS = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
}
# These read a tensor of the CPU without an operator.
_WAITING_METHODS = ("tolist", "numpy", "cpu", "__array__")
_NO_KERNEL = {
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "promote_types",
}


@dataclass
class Counts:
    """How often each operator or method ran, by name.

    Attributes:
        launches: operators that would launch at least one kernel.
        waits: what would make the host wait if the tensors were on an accelerator.
    """

    launches: "collections.Counter[str]" = field(default_factory=collections.Counter)
    waits: "collections.Counter[str]" = field(default_factory=collections.Counter)


class _Operators(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        if name in _WAITING_OPERATORS:
            self._counts.waits[name] += 1
        elif op.namespace == "aten" and not op.is_view and name not in _NO_KERNEL:
            self._counts.launches[name] += 1
        return op(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what this process launches and waits for within the block.

    Use it in one thread, with ranks of :func:`tests.support.ranks.with_fake_ranks`, whose
    collectives are no operators.
    """
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
        stack.enter_context(_Operators(counts))
        yield counts
