"""Faults of PyTorch's own compression and averaging, and the same situations with torchcomp.

The tests of PyTorch describe the pinned torch and are left to `make soak`. If one fails on a later
torch, the fault has been mended: remove the test and its row of docs/reliability.md.
"""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.utils import (
    average_parameters_or_parameter_groups,
)
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.fsdp.runs import mesh_of, shard
from tests.fsdp.runs import weights as weights_of_shards
from tests.support.models import Branches, loss_of, mlp, rows, seeded, weights, wrap
from tests.support.outcomes import caught, equal_on_all, reloaded
from tests.support.ranks import on_processes

# About the process group of a PowerSGDState that was unpickled.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
POWERSGD = "powersgd(rank=1)"
STEPS = 9
Model = DistributedDataParallel
Register = Callable[[Model], Any]


def theirs(model: Model, state: PowerSGDState | None = None) -> PowerSGDState:
    """Register PyTorch's PowerSGD hook, which compresses from the third step on."""
    state = state or PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    return state


def ours(model: Model) -> torchcomp.Handle:
    return torchcomp.register(model, POWERSGD)


def train(model: Model, steps: range, scale: Callable[[int], float] = lambda step: 1.0) -> None:
    for step in steps:
        model.zero_grad()
        (loss_of(model(rows(step, torch.float32))) * scale(step)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad


def several_buckets(register: Register) -> Tensor:
    model = wrap(mlp(torch.float32))
    register(model)
    train(model, range(STEPS))
    return weights(model)


def test_powersgd_with_several_buckets_on_gloo() -> None:
    assert equal_on_all(on_processes(2, several_buckets, ours))


@pytest.mark.soak
def test_pytorchs_powersgd_with_several_buckets_on_gloo_does_not_end() -> None:
    # Its hook waits for a collective in a future's callback, in a thread that other collectives
    # need. Some runs hang, others pair two collectives that differ. Without that, a run takes a
    # second.
    with pytest.raises((TimeoutError, RuntimeError)):
        on_processes(2, several_buckets, theirs, timeout=30)


def one_inf(step: int) -> float:
    return float("inf") if step == 4 and dist.get_rank() == 1 else 1.0


def no_gradient_at_first(step: int) -> float:
    return 0.0 if step < 5 else 1.0


def finite_after(scale: Callable[[int], float], register: Register) -> bool:
    """Whether gradients and weights are finite at the end of a run that skips steps that raise."""
    model = wrap(mlp(torch.float32), bucket_cap_mb=25)
    register(model)
    for step in range(STEPS):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        error = caught(lambda step=step: train(model, range(step, step + 1), scale))
        if error is not None or not torch.isfinite(weights(model)).all():
            # As a GradScaler: the weights stay those before the step.
            with torch.no_grad():
                for parameter, old in zip(model.parameters(), before, strict=True):
                    parameter.copy_(old)
    return all(bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters())


OF_PYTORCH = pytest.param(False, marks=pytest.mark.soak)


@pytest.mark.parametrize("torchcomps", [True, OF_PYTORCH])
@pytest.mark.parametrize("scale", [one_inf, no_gradient_at_first])
def test_powersgd_is_finite_after(scale: Callable[[int], float], torchcomps: bool) -> None:
    outcomes = on_processes(2, finite_after, scale, ours if torchcomps else theirs)
    assert outcomes == [torchcomps] * 2


def resumed(torchcomps: bool) -> bool:
    """Whether a run that continues from a checkpoint ends with the weights of one that went on."""
    model, other = (wrap(mlp(torch.float32), bucket_cap_mb=25) for _ in range(2))
    method: Any = ours(model) if torchcomps else theirs(model)
    train(model, range(6))
    other.module.load_state_dict(reloaded(model.module.state_dict()))
    if torchcomps:
        ours(other).load_state_dict(reloaded(method.state_dict()))
    else:
        theirs(other, pickle.loads(pickle.dumps(method)))
    for each in (model, other):
        train(each, range(6, STEPS))
    return torch.equal(weights(model), weights(other))


@pytest.mark.parametrize("torchcomps", [True, OF_PYTORCH])
def test_powersgd_resumes_bit_for_bit(torchcomps: bool) -> None:
    assert on_processes(2, resumed, torchcomps) == [torchcomps] * 2


def branches(average: Callable[[Model], None]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Average a model of which each rank has trained one of two branches of the same size.

    Returns:
        The weights before and after.
    """
    module = seeded(Branches().double(), seed=dist.get_rank())
    model = DistributedDataParallel(module, find_unused_parameters=True, init_sync=False)
    with model.no_sync():
        loss_of(model(rows(0), ["left" if dist.get_rank() == 0 else "right"])).backward()
    before = reloaded(module.state_dict())
    average(model)
    return before, module.state_dict()


def with_pytorch(model: Model) -> None:
    average_parameters_or_parameter_groups(model.parameters(), dist.group.WORLD)


def with_local_sgd(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sync = torchcomp.LocalSGD(model, optimizer, "every(1)", total_steps=1)
    optimizer.step()
    sync.close()


@pytest.mark.parametrize("torchcomps", [True, OF_PYTORCH])
def test_local_steps_average_branches_that_only_some_ranks_train(torchcomps: bool) -> None:
    average = with_local_sgd if torchcomps else with_pytorch
    (first, after), (second, _) = on_processes(2, branches, average)
    means = [torch.allclose(after[name], (first[name] + second[name]) / 2) for name in after]
    assert all(means) == torchcomps


def weights_of_fsdp2(interrupt: bool, reset: bool) -> Tensor:
    """The weights of this rank after a step, maybe after a backward pass that raised."""
    model = shard(mlp(torch.float32), mesh_of(1, 2)["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if interrupt:
        hook = model[4].register_full_backward_hook(raises)
        caught(lambda: loss_of(model(rows(0, torch.float32))).backward())
        hook.remove()
        if reset:
            model.reset_iter_state()
    optimizer.zero_grad()
    loss_of(model(rows(1, torch.float32))).backward()
    optimizer.step()
    return weights_of_shards(model)


def raises(*arguments: object) -> None:
    raise RuntimeError("in a backward pass")


@pytest.mark.soak
@pytest.mark.parametrize("reset", [False, True])
def test_fsdp2_goes_wrong_after_a_backward_pass_that_raised(reset: bool) -> None:
    whole, after = (on_processes(2, weights_of_fsdp2, each, reset)[0] for each in (False, True))
    # Without a reset, no gradient is averaged; with one, gradients of that pass count again. No
    # error says so.
    assert not torch.allclose(whole, after)
