"""register: the one line that gives a DDP model compressed gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchcomp import wire
from torchcomp.aggregators import Aggregator
from torchcomp.bucket import Group, partition
from torchcomp.component import Component
from torchcomp.ddp.checks import (
    OWNER,
    bucket_caps,
    check_before_backward,
    check_is_ddp,
    check_model,
    trained_parameters,
)
from torchcomp.ddp.executors import Executor, InlineExecutor, StreamExecutor, ThreadExecutor
from torchcomp.ddp.handle import Handle, hook
from torchcomp.exchange import Exchange, first_line
from torchcomp.keys import check_seed
from torchcomp.spec import parse_aggregator


def register(
    model: DistributedDataParallel,
    spec: str | Component,
    *,
    seed: int = 0,
    scaler: "torch.amp.GradScaler | None" = None,
) -> Handle:
    """Exchange the gradients of a DDP model by another method from now on.

    Call it on every rank with the same arguments, after ``DistributedDataParallel(...)`` and before
    the first backward pass. The training loop stays as it is; ``no_sync`` works as before.

    Args:
        model: any DDP model on CPU (gloo) or CUDA (NCCL) with floating-point parameters.
        spec: the method, such as ``"ef(topk(0.01))"``; see :func:`torchcomp.parse`.
        seed: seed of all random choices of the method, a whole number of at least 0.
        scaler: the ``GradScaler`` of the loop, if there is one. Steps that it is going to skip then
            leave the error memory untouched, and the memory follows its scale. Without it, a NaN or
            an infinity in a gradient is an error.

    Returns:
        A handle with statistics, checkpoints and a way to change the method.

    Raises:
        SpecError: if the spec cannot be built; all ranks raise.
        UnsupportedModelError: if the model is not DDP, has a hook, uses an option of DDP that
            bypasses hooks, has complex parameters or sparse gradients, or has trained already.
        RankMismatchError: if the ranks give different specs, seeds or models.
    """
    check_is_ddp(model)
    exchange, executor = _transport(model)
    try:
        aggregator, groups = _agree(model, spec, seed, exchange)
    except BaseException:
        executor.close()
        raise
    parameters = dict(trained_parameters(model))
    handle = Handle(model, parameters, groups, aggregator, exchange, executor, seed, scaler)
    model.register_comm_hook(handle, hook)
    setattr(model, OWNER, f"torchcomp.register('{aggregator}')")
    return handle


def _agree(
    model: DistributedDataParallel, spec: str | Component, seed: int, exchange: Exchange
) -> tuple[Aggregator, tuple[Group, ...]]:
    """Check this rank's arguments, and that all ranks passed theirs and gave the same."""
    problem: Exception | None = None
    try:
        check_seed(seed)
        check_model(model)
        check_before_backward(model)
        aggregator = parse_aggregator(spec)
    except Exception as error:
        problem = error
    facts: dict[str, Any] = {"spec": spec, "seed": seed, "problem": first_line(problem)}
    if problem is None:
        groups = partition(trained_parameters(model), bucket_caps(model))
        shapes = {name: (tuple(p.shape), p.dtype) for name, p in trained_parameters(model)}
        facts |= {"spec": aggregator, "parameters": shapes, "groups": groups}
        facts["wire version"] = wire.VERSION
    exchange.require_same("torchcomp.register", facts)
    if problem is not None:
        raise problem
    return aggregator, groups


def _transport(model: DistributedDataParallel) -> tuple[Exchange, Executor]:
    group, device = model.process_group, next(model.module.parameters()).device
    if device.type == "cuda":
        return Exchange(group, device), StreamExecutor(device)
    # Not get_backend, because a group that was made without naming a backend has several.
    if "cpu:gloo" not in dist.get_backend_config(group):
        return Exchange(group, device), InlineExecutor()
    # A group of its own, because DDP and the user issue collectives from another thread.
    ranks = dist.get_process_group_ranks(group)
    private = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return Exchange(private, device), ThreadExecutor()
