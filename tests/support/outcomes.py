"""Compare tensors, states and errors, of one rank or of all."""

import io
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import torchcomp
from tests.support.ranks import on_threads


@torch.no_grad()
def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return a copy of all values in one float64 vector."""
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors])


def equal_on_all(values: Iterable[Tensor]) -> bool:
    """Whether all tensors are equal, bit for bit."""
    first, *others = values
    return all(torch.equal(first, other) for other in others)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_replicas_equal(values: list[Tensor]) -> None:
    for rank, value in enumerate(values):
        assert torch.equal(value, values[0]), f"rank {rank} differs from rank 0"


def unsent(states: list[Any]) -> Tensor:
    """Residuals of the states of all ranks, joined as for one rank: a row for each kind."""
    (whole,) = torchcomp.redistribute(states, 1)
    debts = [slot["tensors"] for slot in whole["slots"].values() if slot["kind"] == "debt"]
    return torch.stack([flat(tensors[name] for name in sorted(tensors)) for tensors in debts])


def messages(stats: torchcomp.Stats) -> torchcomp.Stats:
    """Return the counters without those of control messages."""
    return replace(stats, control_bytes_sent=0, total_control_bytes_sent=0)


def messages_of(state: Any) -> Any:
    """Return a state without its counters of control messages; see :func:`messages`."""
    if not isinstance(state, dict):
        return state
    return {name: messages_of(value) for name, value in state.items() if name != "control"}


def same(one: Any, other: Any) -> bool:
    """Whether two results or state dicts are equal bit for bit, including their types."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        like = one.dtype == other.dtype and one.shape == other.shape
        # By bytes, because `equal` takes -0.0 for 0.0 and no NaN for another.
        bits = (t.contiguous().view(-1).view(torch.uint8) for t in (one, other))
        return like and torch.equal(*bits)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def reloaded(state: Any) -> Any:
    """Return a state dict after saving it to a file and loading it with weights_only=True."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def caught(call: Callable[[], Any]) -> Exception | None:
    """Return the exception that `call` raises, or None."""
    try:
        call()
    except Exception as error:
        return error
    return None


def raised_by(call: Callable[[], Any]) -> Exception:
    """Return the exception that `call` raises. It must raise one."""
    error = caught(call)
    assert error is not None, "no exception"
    return error


def assert_refused(
    world_size: int,
    body: Callable[[], Any],
    error: type[Exception],
    *words: str,
    match: str = "",
    field: str | None = None,
) -> None:
    """Require that `body` raises exactly `error` on every rank."""
    for rank, outcome in enumerate(on_threads(world_size, body, catch=True)):
        assert type(outcome) is error, f"rank {rank}: {outcome!r}"
        if field is not None:
            assert outcome.field == field, f"rank {rank}: {outcome.field}"
        for word in words:
            assert word in str(outcome), f"rank {rank}: {outcome}"
        assert re.search(match, str(outcome)), f"rank {rank}: {outcome}"
