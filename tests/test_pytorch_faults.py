"""Faults of PyTorch's own compression and averaging, and the same situations with torchcomp.

The tests of PyTorch describe the pinned torch and are left to `make soak`. If one fails on a later
torch, the fault has been mended: remove the test and its row of docs/reliability.md.
"""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.support.models import loss_of, mlp, rows, weights, wrap
from tests.support.outcomes import caught, equal_on_all, reloaded
from tests.support.ranks import on_processes

# About the process group of a PowerSGDState that was unpickled.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
STEPS = 9


def register(model: DistributedDataParallel, torchcomps: bool, state: Any = None) -> Any:
    """Register PowerSGD. That of PyTorch compresses from the third step on."""
    if torchcomps:
        return torchcomp.register(model, "powersgd(rank=1)")
    state = state or PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    return state


def train(model: DistributedDataParallel, steps: range, scale: float = 1.0) -> None:
    for step in steps:
        model.zero_grad()
        (loss_of(model(rows(step, torch.float32))) * scale).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad


def several_buckets(torchcomps: bool) -> Tensor:
    model = wrap(mlp(torch.float32))
    register(model, torchcomps)
    train(model, range(STEPS))
    return weights(model)


def test_powersgd_with_several_buckets_on_gloo() -> None:
    assert equal_on_all(on_processes(2, several_buckets, True))


@pytest.mark.soak
def test_pytorchs_powersgd_with_several_buckets_on_gloo_does_not_end() -> None:
    # Its hook waits for a collective in a future's callback, in a thread that other collectives
    # need. Some runs hang, others pair two collectives that differ.
    with pytest.raises((TimeoutError, RuntimeError)):
        on_processes(2, several_buckets, False, timeout=30)


def finite_after(fault: str, torchcomps: bool) -> bool:
    """Whether gradients are finite at the end of a run that skips steps that raise."""
    model = wrap(mlp(torch.float32), bucket_cap_mb=25)
    register(model, torchcomps)
    scales = [0.0] * 5 + [1.0] * 4 if fault == "no gradient at first" else [1.0] * STEPS
    if fault == "an infinity" and dist.get_rank() == 1:
        scales[4] = float("inf")
    for step in range(STEPS):
        before = copy.deepcopy(model.module.state_dict())
        error = caught(lambda step=step: train(model, range(step, step + 1), scales[step]))
        if error is not None or not torch.isfinite(weights(model)).all():
            model.module.load_state_dict(before)  # as a GradScaler
    return all(bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters())


def resumed(torchcomps: bool) -> bool:
    """Whether a run that continues from a checkpoint ends with the weights of one that went on."""
    model, other = (wrap(mlp(torch.float32), bucket_cap_mb=25) for _ in range(2))
    method = register(model, torchcomps)
    train(model, range(6))
    other.module.load_state_dict(reloaded(model.module.state_dict()))
    if torchcomps:
        register(other, True).load_state_dict(reloaded(method.state_dict()))
    else:
        register(other, False, pickle.loads(pickle.dumps(method)))
    for each in (model, other):
        train(each, range(6, STEPS))
    return torch.equal(weights(model), weights(other))


@pytest.mark.parametrize("torchcomps", [True, pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "sound",
    [partial(finite_after, "an infinity"), partial(finite_after, "no gradient at first"), resumed],
    ids=["finite after an infinity", "finite after no gradient", "resumed bit for bit"],
)
def test_powersgd_is(sound: Callable[[bool], bool], torchcomps: bool) -> None:
    assert on_processes(2, sound, torchcomps) == [torchcomps] * 2
