"""The options of local steps: parse them, and refuse what cannot work."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from torchcomp.aggregators import Aggregator
from torchcomp.ddp.checks import OWNER, check_model, device_of, trained_parameters
from torchcomp.ddp.register import check_scaler
from torchcomp.engine.keys import check_seed
from torchcomp.exchange import Exchange, ProcessGroupExchange
from torchcomp.local_sgd.outer_steps import OuterStep
from torchcomp.local_sgd.schedules import Every, Horizon, Schedule
from torchcomp.specs.auto import Auto
from torchcomp.specs.checks import check_choice, check_flag
from torchcomp.specs.component import Component
from torchcomp.specs.errors import SpecError, UnsupportedModelError
from torchcomp.specs.spec import parse_aggregator, parse_local, parse_outer_step

ProcessGroup = dist.ProcessGroup | DeviceMesh
Optimizers = Sequence[torch.optim.Optimizer]
Parameters = dict[str, nn.Parameter]


@dataclass(frozen=True)
class LocalMethod:
    """The parsed options."""

    schedule: Schedule
    horizon: Horizon
    aggregator: Aggregator
    outer: OuterStep | None
    two_levels: bool  # DDP continues to reduce gradients inside each node
    moments: str
    overlap: bool
    seed: int
    proposes: bool = False  # "auto": averages after each step, and a proposal

    @property
    def spec(self) -> str:
        return str(self.schedule)

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
            raise SpecError(
                f"process_group {others} must contain one rank of each of DDP's groups; this "
                f"rank's DDP group is {mine}, and they share {shared}. To take local steps on "
                "every rank, leave process_group out"
            )
        return ProcessGroupExchange(chosen, node.device), {}

    # Built over the node: `across` can fail on one rank alone, because groups differ between ranks.
    between = node.build("torchcomp.LocalSGD", {"process_group": "set"}, across)
    # From now on an error on one rank is raised on all ranks of both levels.
    Exchange.split(inside=node, between=between)
    return between


def parsed(
    model: DistributedDataParallel,
    optimizers: Optimizers,
    scaler: object,
    two_levels: bool,
    options: dict[str, Any],
) -> tuple[LocalMethod, dict[str, Any]]:
    """Return the parsed options, and the values that must be equal on all ranks."""
    if not two_levels:
        _check_reduces_nothing(model)
    check_model(model, or_registered=two_levels)
    parameters = dict(trained_parameters(model))
    for name, parameter in parameters.items():
        if parameter.is_meta or parameter.layout != torch.strided:
            raise UnsupportedModelError(
                f"parameter '{name}' is on {parameter.device} with layout {parameter.layout}, and "
                "an average needs dense values: make them before DistributedDataParallel(...)"
            )
    _check_optimizers(optimizers, model, two_levels)
    check_scaler(scaler)
    method = _method(two_levels=two_levels, **options)
    lrs = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    for reader in (method.schedule, method.outer):
        if reader and reader.reads_lr and not all(isinstance(lr, Real | Tensor) for lr in lrs):
            raise SpecError(
                f"{reader} reads the learning rate, but a parameter group's 'lr' is not a number: "
                "use a schedule that does not read it, such as every(8)",
                "optimizer",
            )
    return method, {
        "spec": Auto.name if method.proposes else method.spec,
        "compress": method.aggregator,
        "outer": method.outer,
        "parameters": [(name, tuple(p.shape), p.dtype) for name, p in parameters.items()],
    }


def _method(
    spec: str | Component,
    total_steps: int,
    warmup_steps: int,
    compress: Any,
    outer: str | OuterStep | None,
    **others: Any,
) -> LocalMethod:
    horizon = Horizon(total_steps, warmup_steps)
    schedule = parse_local(spec)
    proposes = isinstance(schedule, Auto)
    if proposes and others["overlap"]:
        raise SpecError("'auto' cannot measure averages that overlap: leave out overlap", "spec")
    chosen = Every(1) if isinstance(schedule, Auto) else schedule
    chosen.check(horizon)
    check_seed(others["seed"])
    check_choice("moments", others["moments"], ("local", "average", "reset"))
    check_flag("overlap", others["overlap"])
    if not isinstance(compress, str | Component):
        problem = f"compress must be a method such as 'ef(topk(0.01))', or 'mean', not {compress!r}"
        raise SpecError(problem, "compress")
    step = None if outer is None else parse_outer_step(outer)
    aggregator = parse_aggregator(compress)
    method = LocalMethod(chosen, horizon, aggregator, step, proposes=proposes, **others)
    # A pseudo-gradient is measured from the averaged parameters, which must be complete by then.
    if method.overlap and not method.plain:
        raise SpecError("overlap=True needs compress='mean' and outer=None", "overlap")
    return method


def _held(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _check_reduces_nothing(model: DistributedDataParallel) -> None:
    for hook, _ in model._comm_hooks:
        # The name of torchcomp's own hook means nothing to the user.
        own = hook.__module__.startswith("torchcomp.")
        name = getattr(model, OWNER, "") if own else getattr(hook, "__qualname__", "a hook")
        raise UnsupportedModelError(
            f"{name} is already installed on this model, but local steps exchange no gradients: "
            "build DistributedDataParallel without it. To compress pseudo-gradients, use "
            "torchcomp.LocalSGD(..., compress='ef(topk(0.01))')"
        )
    if model.static_graph:
        raise UnsupportedModelError(
            "static_graph=True makes DDP expect a gradient all-reduce in its first backward pass, "
            "and local steps do none: build DistributedDataParallel without it"
        )


def _check_optimizers(
    optimizers: Optimizers, model: DistributedDataParallel, two_levels: bool
) -> None:
    names = ", ".join(type(each).__name__ for each in optimizers) or "an empty list"
    kinds = {kind.__name__ for each in optimizers for kind in type(each).__mro__}
    ours, problem = set(map(id, model.parameters())), ""
    # Optimizer.__init__ makes the hooks. Wrappers such as PostLocalSGDOptimizer do not call it.
    hooked = all(hasattr(each, "_optimizer_step_pre_hooks") for each in optimizers)
    if not hooked or not 0 < len(set(map(id, optimizers))) == len(optimizers):
        problem = (
            "optimizer must be a torch.optim.Optimizer or a list of distinct ones, and not one "
            f"that wraps another (pass the inner one), not {names}"
        )
    # Compared by name, because importing its package compiles all functional optimizers.
    elif "ZeroRedundancyOptimizer" in kinds and not two_levels:
        problem = (
            "ZeroRedundancyOptimizer broadcasts parameters at every step, so ranks cannot take "
            "local steps: use a plain torch.optim optimizer"
        )
    elif not all(_held(each) & ours for each in optimizers):
        problem = f"{names}: no parameter of this model. Build it from model.parameters()"
    if problem:
        raise SpecError(problem, "optimizer")
