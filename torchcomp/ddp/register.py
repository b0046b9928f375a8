"""register: install compressed gradient exchange on a DDP model."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from torchcomp import wire
from torchcomp.aggregators import Aggregator, Mean, planned_traffic
from torchcomp.aggregators.rehearsal import rehearse_all
from torchcomp.averager import Averager
from torchcomp.bucket import Group, partition
from torchcomp.checks import check_choice
from torchcomp.component import Component
from torchcomp.ddp.averaging import Averaging, Flat
from torchcomp.ddp.checks import (
    OWNER,
    REGISTERED,
    bucket_caps,
    check_before_backward,
    check_is_ddp,
    check_model,
    check_scaler,
    device_of,
    trained_parameters,
)
from torchcomp.ddp.executors import transport
from torchcomp.ddp.handle import Handle, hook
from torchcomp.ddp.optimizer_lrs import OptimizerLRs, Optimizers
from torchcomp.ddp.two_level import Levels, TwoLevel
from torchcomp.errors import SpecError
from torchcomp.exchange import ProcessGroupExchange
from torchcomp.keys import check_seed
from torchcomp.nodes import Nodes
from torchcomp.spec import parse_aggregator
from torchcomp.stats import sent_instead

_log = logging.getLogger(__name__)

_Checked = tuple[Aggregator, tuple[Group, ...], OptimizerLRs | None, Nodes | None]
"""The method, the groups of parameters, their learning rates, and the nodes of two levels."""


def register(
    model: DistributedDataParallel,
    spec: str | Component,
    *,
    seed: int = 0,
    scaler: "torch.amp.GradScaler | None" = None,
    check: str = "step",
    lr_inside: Optimizers | None = None,
    nodes: str | int | DeviceMesh | None = None,
) -> Handle:
    """Replace the gradient all-reduce of a DDP model with a compressed exchange.

    Call this on every rank with the same arguments, after ``DistributedDataParallel(...)`` and
    before the first backward pass. The training loop does not change, and ``no_sync`` works
    unchanged.

    Args:
        model: a DDP model on CPU (gloo) or CUDA (NCCL) with floating-point parameters.
        spec: the method, such as ``"ef(topk(0.01))"``; see :func:`torchcomp.parse`.
        seed: seed of all random choices of the method, an integer of at least 0.
        scaler: the ``GradScaler`` of the training loop, if it has one. The residual then follows
            the loss scale, and does not change in steps that the scaler skips. Without a scaler, a
            NaN or infinity in a gradient raises an error.
        check: when a step with a NaN, an infinity or a damaged message raises. "step": at the end
            of its backward pass, and nothing has changed. "late": in the next backward pass, swap
            or ``state_dict()``, so that the host does not wait for the device at the end of a step.
            The optimizer has then applied the step; only the handle's state is rolled back. Not
            with a scaler, nor with ``find_unused_parameters=True``, which need the result in the
            same step.
        lr_inside: the optimizer of the training loop, or a list of all that train the model. The
            residual is then in the unit of the update, the learning rate times the gradient: what
            is sent late is applied at the learning rate of the step that it comes from. By default,
            it is in the unit of the gradients, and applied at the learning rate of the step that
            sends it. While the learning rate is constant, both are the same. Meant for SGD without
            momentum: any other optimizer logs a warning. docs/usage.md has the details.
        nodes: which ranks share a network card, to exchange in two levels. The ranks of a node
            average their gradients uncompressed; the method then runs between the nodes, and each
            rank keeps the residual of its share of the model. "auto" reads from torchrun how many
            ranks a node has. Otherwise, pass that number, or a DeviceMesh with two dimensions,
            nodes and their ranks. By default, all ranks exchange with all others.

    Returns:
        A handle for statistics, checkpoints and changes of the method.

    Raises:
        SpecError: on every rank, if the spec, the seed, the scaler, `check` or `lr_inside` is
            invalid, or if a parameter of the model is in no optimizer of `lr_inside` or in several.
        UnsupportedModelError: if the model is not DDP, has a hook, uses an option of DDP that
            bypasses hooks, has complex parameters, sparse gradients or parameters on several
            devices, or has trained already.
        RankMismatchError: if specs, seeds or models differ between ranks, or only some ranks fail.
    """
    # Without DDP there is no process group in which the ranks could verify anything.
    check_is_ddp(model)
    device = device_of(model)
    # Verify in DDP's own group. Creating a group would hang if another rank has already raised.
    everyone = ProcessGroupExchange(model.process_group, device)
    inside = "none" if lr_inside is None else "set"
    arguments = {"spec": spec, "seed": seed, "check": check, "lr_inside": inside}
    aggregator, groups, lrs, divided = everyone.build(
        "torchcomp.register",
        {**arguments, "nodes": "a DeviceMesh" if isinstance(nodes, DeviceMesh) else nodes},
        lambda: _check(model, spec, seed, scaler, check, lr_inside, nodes, everyone.global_ranks),
    )
    parameters = dict(trained_parameters(model))
    make = partial(Averager, aggregator, seed=seed, late=check == "late")
    averaging: Averaging
    if divided is None:
        exchange, executor = transport(model.process_group, device)
        averaging = Flat(make(exchange, parameters, groups), everyone, executor)
    else:
        averaging = TwoLevel(make, parameters, groups, Levels(divided, everyone))
    handle = Handle(model, averaging, scaler, lrs)
    # A plain function with the handle as its state: DDP refuses partials and callable objects.
    model.register_comm_hook(handle, hook)
    setattr(model, OWNER, f"{REGISTERED}('{aggregator}')")
    # On one rank only: the messages would be the same on all ranks.
    if everyone.rank == 0:
        _log_method(averaging.averager)
        _log_optimizers(lrs)
    return handle


def _log_method(averager: Averager) -> None:
    """Log what was registered, and a warning if the method loses much of the gradient."""
    aggregator, shapes = averager.aggregator, [averager.shape_of(g) for g in averager.buckets]
    planned = planned_traffic(aggregator, shapes, averager.exchange.world_size)
    warmup_steps = aggregator.stages[-1]
    _log.info(
        "registered %s: %d parameters with %s elements, groups: %d, per step%s %s",
        aggregator,
        len(averager.parameters),
        f"{sum(shape.numel for shape in shapes):,}",
        len(shapes),
        f" after the first {warmup_steps:,}" if warmup_steps else "",
        sent_instead(planned.sent, planned.dense),
    )
    if isinstance(aggregator, Mean) and aggregator.loses:
        _log.warning(
            "%s keeps no residual, so the part of the gradient that it does not send is lost. "
            "Use ef(%s) to send it in later steps",
            aggregator,
            aggregator.compressor,
        )


def _log_optimizers(lrs: OptimizerLRs | None) -> None:
    """Log a warning if the learning rate is inside the residual, but does not belong there."""
    if lrs is not None and lrs.unfit:
        _log.warning(
            "lr_inside is meant for SGD without momentum, but the optimizer is %s. A momentum "
            "multiplies what was sent by later learning rates, and Adam divides the unit away. "
            "Leave out lr_inside",
            ", ".join(lrs.unfit),
        )


def _check(
    model: DistributedDataParallel,
    spec: str | Component,
    seed: int,
    scaler: "torch.amp.GradScaler | None",
    check: str,
    lr_inside: Optimizers | None,
    nodes: object,
    ranks: Sequence[int],
) -> tuple[_Checked, dict[str, Any]]:
    """Return what the arguments stand for, and what must match on all ranks."""
    check_seed(seed)
    check_scaler(scaler)
    check_choice("check", check, ("step", "late"))
    check_model(model)
    if check == "late":
        _check_late(model, scaler)
    check_before_backward(model)
    aggregator = parse_aggregator(spec)
    trained = trained_parameters(model)
    # An error in it must be raised on all ranks.
    rehearse_all(aggregator, [parameter for _, parameter in trained])
    groups = partition(trained, bucket_caps(model))
    lrs = None if lr_inside is None else OptimizerLRs(lr_inside, dict(trained))
    divided = None if nodes is None else Nodes.of(nodes, ranks)
    values = {
        "spec": aggregator,
        "nodes": divided and divided.ranks,
        # With names: DDP itself verifies only the shapes.
        "parameters": [(name, tuple(p.shape), p.dtype) for name, p in trained],
        "groups": groups,
        "wire version": wire.VERSION,  # ranks can run different versions of torchcomp
    }
    # One rank on each node: there is nothing to average inside.
    two_levels = divided if divided is not None and divided.size > 1 else None
    return (aggregator, groups, lrs, two_levels), values


def _check_late(model: DistributedDataParallel, scaler: "torch.amp.GradScaler | None") -> None:
    needs = None
    if scaler is not None and scaler.is_enabled():
        needs = "a GradScaler, which skips steps that overflow"
    elif model.find_unused_parameters and not model.static_graph:
        needs = "find_unused_parameters=True, which leaves unused parameters as they are"
    if needs is not None:
        raise SpecError(
            f"check='late' decides after a step was applied, and does not fit {needs}. Use "
            "check='step'",
            "check",
        )
