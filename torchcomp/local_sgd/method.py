"""The options of local steps: parse them, and refuse what cannot work."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from torchcomp.aggregators import Aggregator
from torchcomp.ddp.checks import OWNER, check_model, device_of, trained_parameters
from torchcomp.ddp.register import check_scaler
from torchcomp.engine.keys import check_seed
from torchcomp.exchange import Exchange, ProcessGroupExchange
from torchcomp.local_sgd.moments import CHOICES
from torchcomp.local_sgd.outer_steps import OuterStep
from torchcomp.local_sgd.schedules import Every, Horizon, Schedule
from torchcomp.specs.auto import Auto
from torchcomp.specs.checks import check_choice, check_flag
from torchcomp.specs.component import Component
from torchcomp.specs.errors import SpecError, UnsupportedModelError
from torchcomp.specs.spec import parse_aggregator, parse_local, parse_outer_step

ProcessGroup = dist.ProcessGroup | DeviceMesh
Optimizers = Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class LocalMethod:
    """The parsed options."""

    schedule: Schedule
    proposes: bool  # "auto": averages after each step, and a proposal
    horizon: Horizon
    aggregator: Aggregator
    outer: OuterStep | None
    two_levels: bool  # DDP continues to reduce gradients inside each node
    moments: str
    overlap: bool
    seed: int

    @property
    def plain(self) -> bool:
        """Whether a synchronisation is only the exact mean of the parameters."""
        return self.aggregator.transparent and self.outer is None


def ranks_of(model: DistributedDataParallel, group: ProcessGroup | None) -> ProcessGroupExchange:
    """The exchange that averages parameters; with `group`, the upper level of two."""
    node = ProcessGroupExchange(model.process_group, device_of(model))
    if group is None:
        return node

    def across() -> tuple[ProcessGroupExchange, dict[str, Any]]:
        chosen: object = group
        if isinstance(group, DeviceMesh) and group.ndim == 1:
            chosen = group.get_group()
        if not isinstance(chosen, dist.ProcessGroup):
            raise SpecError(
                "process_group must be a torch.distributed.ProcessGroup or a DeviceMesh of one "
                f"dimension that contains this rank, not {type(chosen).__name__}"
            )
        mine, others = map(dist.get_process_group_ranks, (model.process_group, chosen))
        shared = sorted({*mine} & {*others})
        if shared != [dist.get_rank()]:
            problem = f"{others} and DDP's group {mine} of this rank share {shared}"
            raise SpecError(f"process_group must contain one rank of each DDP group: {problem}")
        return ProcessGroupExchange(chosen, node.device), {}

    # Over the node: `across` can fail on one rank alone, because groups differ between ranks.
    between = node.build("torchcomp.LocalSGD", {"process_group": "set"}, across)
    # From now on an error on one rank is raised on all ranks of both levels.
    Exchange.split(inside=node, between=between)
    return between


def parsed(
    model: DistributedDataParallel,
    optimizers: Optimizers,
    scaler: object,
    two_levels: bool,
    *,
    spec: str | Component,
    total_steps: int,
    warmup_steps: int,
    compress: Any,
    outer: str | OuterStep | None,
    moments: str,
    overlap: bool,
    seed: int,
) -> tuple[LocalMethod, dict[str, Any]]:
    """Return the parsed options, and the values that must be equal on all ranks."""
    parameters = _checked_parameters(model, two_levels)
    _check_optimizers(optimizers, model, two_levels)
    check_scaler(scaler)
    found, horizon = parse_local(spec), Horizon(total_steps, warmup_steps)
    schedule, proposes = (Every(1), True) if isinstance(found, Auto) else (found, False)
    schedule.check(horizon)
    check_flag("overlap", overlap)
    check_choice("moments", moments, CHOICES)
    if proposes and overlap:
        raise SpecError("'auto' cannot measure averages that overlap: leave out overlap", "spec")
    if not isinstance(compress, str | Component):
        problem = f"compress must be a method such as 'ef(topk(0.01))', or 'mean', not {compress!r}"
        raise SpecError(problem, "compress")
    aggregator, seed = parse_aggregator(compress), check_seed(seed)
    step = None if outer is None else parse_outer_step(outer)
    options = aggregator, step, two_levels, moments, overlap, seed
    method = LocalMethod(schedule, proposes, horizon, *options)
    # A pseudo-gradient is measured from the averaged parameters, which must be complete by then.
    if overlap and not method.plain:
        raise SpecError("overlap=True needs compress='mean' and outer=None", "overlap")
    lrs = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    for reader in (schedule, step):
        if reader and reader.reads_lr and not all(isinstance(lr, Real | Tensor) for lr in lrs):
            raise SpecError(
                f"{reader} reads the learning rate, but a parameter group's 'lr' is not a number; "
                "every(8) does not",
                "optimizer",
            )
    shared = {"compress": aggregator, "outer": step, "parameters": parameters}
    return method, shared | {"spec": found}


def _checked_parameters(model: DistributedDataParallel, two_levels: bool) -> list[Any]:
    """Return names, shapes and dtypes of the trained parameters, if the model can be averaged."""
    for hook, _ in [] if two_levels else model._comm_hooks:
        # The name of torchcomp's own hook means nothing to the user.
        own = hook.__module__.startswith("torchcomp.")
        name = getattr(model, OWNER, "") if own else getattr(hook, "__qualname__", "a hook")
        raise UnsupportedModelError(
            f"{name} is already installed on this model, but local steps exchange no gradients: "
            "build DistributedDataParallel without it. To compress pseudo-gradients, use "
            "torchcomp.LocalSGD(..., compress='ef(topk(0.01))')"
        )
    if model.static_graph and not two_levels:
        raise UnsupportedModelError(
            "static_graph=True expects a gradient all-reduce in the first backward pass, and local "
            "steps do none: build DistributedDataParallel without it"
        )
    check_model(model, or_registered=two_levels)
    return [(name, tuple(p.shape), p.dtype) for name, p in trained_parameters(model)]


def _check_optimizers(
    optimizers: Optimizers, model: DistributedDataParallel, two_levels: bool
) -> None:
    names = ", ".join(type(each).__name__ for each in optimizers) or "an empty list"
    # Optimizer.__init__ makes the hooks. Wrappers such as PostLocalSGDOptimizer do not call it.
    hooked = all(hasattr(each, "_optimizer_step_pre_hooks") for each in optimizers)
    # Compared by name, because importing its package compiles all functional optimizers.
    kinds = {kind.__name__ for each in optimizers for kind in type(each).__mro__}
    zero = "ZeroRedundancyOptimizer" in kinds and not two_levels  # broadcasts at every step
    if zero or not hooked or not 0 < len(set(map(id, optimizers))) == len(optimizers):
        expected = "a plain torch.optim.Optimizer that wraps no other, or a list of distinct ones"
        raise SpecError(f"optimizer must be {expected}, not {names}", "optimizer")
    ours = set(map(id, model.parameters()))
    for each in optimizers:
        if ours.isdisjoint(id(p) for group in each.param_groups for p in group["params"]):
            problem = f"{names}: no parameter of this model. Build it from model.parameters()"
            raise SpecError(problem, "optimizer")
