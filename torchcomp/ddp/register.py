"""register: the one line that gives a DDP model compressed gradients."""

import logging
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchcomp import wire
from torchcomp.aggregators import Aggregator, Mean
from torchcomp.averager import Averager
from torchcomp.bucket import Group, partition
from torchcomp.component import Component
from torchcomp.ddp.checks import (
    OWNER,
    bucket_caps,
    check_before_backward,
    check_is_ddp,
    check_model,
    check_scaler,
    trained_parameters,
)
from torchcomp.ddp.executors import transport
from torchcomp.ddp.handle import Handle, hook
from torchcomp.exchange import ProcessGroupExchange
from torchcomp.keys import check_seed
from torchcomp.spec import parse_aggregator

_log = logging.getLogger(__name__)


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
            leave the residual untouched, and the residual follows its scale. Without it, a NaN or
            an infinity in a gradient is an error.

    Returns:
        A handle with statistics, checkpoints and a way to change the method.

    Raises:
        SpecError: if the spec cannot be built, or an argument is no seed or no scaler; all ranks
            raise.
        UnsupportedModelError: if the model is not DDP, has a hook, uses an option of DDP that
            bypasses hooks, has complex parameters or sparse gradients, or has trained already.
        RankMismatchError: if the ranks give different specs, seeds or models.
    """
    check_is_ddp(model)
    device = next(model.module.parameters()).device
    # In DDP's own group: making another one waits for a rank that does not come without end.
    aggregator, groups = ProcessGroupExchange(model.process_group, device).build(
        "torchcomp.register",
        {"spec": spec, "seed": seed},
        lambda: _check(model, spec, seed, scaler),
    )
    exchange, executor = transport(model.process_group, device)
    parameters = dict(trained_parameters(model))
    averager = Averager(aggregator, exchange, parameters, groups, seed=seed)
    handle = Handle(model, averager, executor, scaler)
    model.register_comm_hook(handle, hook)
    setattr(model, OWNER, f"torchcomp.register('{aggregator}')")
    if isinstance(aggregator, Mean) and aggregator.loses and exchange.rank == 0:
        _log.warning(
            "%s keeps no residual: what it does not send is lost; ef(%s) sends it later",
            aggregator,
            aggregator.compressor,
        )
    return handle


def _check(
    model: DistributedDataParallel, spec: str | Component, seed: int, scaler: object
) -> tuple[tuple[Aggregator, tuple[Group, ...]], dict[str, Any]]:
    """What this rank's arguments come to, and the facts that all ranks must share."""
    check_seed(seed)
    check_scaler(scaler)
    check_model(model)
    check_before_backward(model)
    aggregator = parse_aggregator(spec)
    trained = trained_parameters(model)
    groups = partition(trained, bucket_caps(model))
    facts = {
        "spec": aggregator,
        "parameters": [(name, tuple(p.shape), p.dtype) for name, p in trained],
        "groups": groups,
        "wire version": wire.VERSION,
    }
    return (aggregator, groups), facts
