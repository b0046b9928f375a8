"""Options of local steps: what they mean, and what is refused before training, with the reason."""

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from torchcomp.aggregators import Aggregator
from torchcomp.bucket import Group
from torchcomp.checks import check_choice, check_count, check_flag
from torchcomp.component import Component
from torchcomp.ddp.checks import OWNER, check_model, check_scaler, trained_parameters
from torchcomp.errors import SpecError, UnsupportedModelError
from torchcomp.exchange import Exchange, ProcessGroupExchange
from torchcomp.keys import check_seed
from torchcomp.outer_steps import OuterStep
from torchcomp.schedules import Horizon, Schedule
from torchcomp.spec import parse_aggregator, parse_outer_step, parse_schedule

Specs = str | Component | Sequence[str | Component]
ProcessGroup = dist.ProcessGroup | DeviceMesh
Parameters = dict[str, nn.Parameter]
Parts = tuple[tuple[Group, tuple[int, ...]], ...]


@dataclass(frozen=True)
class LocalMethod:
    """What the options mean, with one schedule for all optimizers, or one for each.

    Attributes:
        parts: by schedule, names of its parameters, and indices of the optimizers that it reads.
        two_levels: whether DDP goes on to reduce gradients inside nodes.
    """

    schedules: tuple[Schedule, ...]
    parts: Parts
    horizon: Horizon
    aggregator: Aggregator
    outer: OuterStep | None
    two_levels: bool
    moments: str
    fragments: int
    overlap: bool
    seed: int

    @property
    def spec(self) -> str:
        """The schedules as one string."""
        return ", ".join(map(str, self.schedules))

    @property
    def plain(self) -> bool:
        """Whether a synchronisation is the exact mean of the parameters, and nothing else."""
        return self.aggregator.transparent and self.outer is None


def ranks_of(model: DistributedDataParallel, group: ProcessGroup | None) -> ProcessGroupExchange:
    """The ranks that average with each other; with a `group`, the upper level of a split."""
    # Not of a parameter that will be refused, on all ranks, for having no values.
    devices = (p.device for p in model.module.parameters() if not p.is_meta)
    device = next(devices, torch.device("cpu"))
    node = ProcessGroupExchange(model.process_group, device)
    if group is None:
        return node

    def across() -> tuple[ProcessGroupExchange, dict[str, Any]]:
        chosen: object = group
        if isinstance(group, DeviceMesh) and group.ndim == 1:
            chosen = group.get_group()
        if not isinstance(chosen, dist.ProcessGroup):
            raise SpecError(
                "process_group must be a torch.distributed.ProcessGroup or a DeviceMesh of one "
                f"dimension that holds this rank, not {type(chosen).__name__}"
            )
        mine = dist.get_process_group_ranks(model.process_group)
        others = dist.get_process_group_ranks(chosen)
        shared = sorted(set(mine) & set(others))
        if shared != [dist.get_rank()]:
            raise SpecError(
                "process_group averages between groups of ranks that DDP keeps together, so it "
                f"takes one rank of each; DDP's group of this rank is {mine}, and process_group "
                f"{others} shares {shared} with it. For local steps of every rank, leave "
                "process_group out"
            )
        return ProcessGroupExchange(chosen, device), {}

    between = node.build("torchcomp.LocalSGD", {"process_group": "one of its own"}, across)
    Exchange.split(inside=node, between=between)
    return between


def check_arguments(
    model: DistributedDataParallel,
    optimizers: list[torch.optim.Optimizer],
    scaler: object,
    two_levels: bool,
    options: dict[str, Any],
) -> tuple[LocalMethod, dict[str, Any]]:
    """What this rank's arguments mean, and the facts that all ranks must share."""
    if not two_levels:
        check_no_hook(model)
    check_model(model)
    check_values(model)
    if model.static_graph and not two_levels:
        raise UnsupportedModelError(
            "static_graph=True makes DDP expect an exchange in its first backward pass, and local "
            "steps exchange no gradients: build DistributedDataParallel without it"
        )
    _check_optimizers(optimizers, model, two_levels)
    check_scaler(scaler)
    parameters = dict(trained_parameters(model))
    method = _method(optimizers, parameters, two_levels=two_levels, **options)
    readers = [each for each in (*method.schedules, method.outer) if each and each.reads_lr]
    for index, optimizer in enumerate(optimizers if readers else ()):
        if not all(isinstance(group.get("lr"), Real | Tensor) for group in optimizer.param_groups):
            raise SpecError(
                f"{readers[0]} reads the learning rate, and {type(optimizer).__name__} (optimizer "
                f"{index}) has a parameter group without a number as 'lr': take a schedule that "
                "reads none, such as every(8)",
                "optimizer",
            )
    facts = {
        "spec": method.spec,
        "compress": method.aggregator,
        "outer": method.outer,
        "parameters": [(name, tuple(p.shape), p.dtype) for name, p in parameters.items()],
    }
    return method, facts


def _method(
    optimizers: list[torch.optim.Optimizer],
    parameters: Parameters,
    spec: Specs,
    total_steps: int,
    warmup_steps: int,
    compress: object,
    outer: str | OuterStep | None,
    **others: Any,
) -> LocalMethod:
    horizon = Horizon(total_steps, warmup_steps)
    specs = spec if isinstance(spec, list | tuple) else [spec]
    if specs is spec and len(specs) != len(optimizers):
        raise SpecError(
            f"{len(specs)} schedules for {len(optimizers)} optimizers: give one schedule for all, "
            "or a list with one for each optimizer"
        )
    schedules = tuple(map(parse_schedule, specs))
    for schedule in schedules:
        schedule.check(horizon)
    check_seed(others["seed"])
    check_choice("moments", others["moments"], ("local", "average", "reset"))
    check_count("fragments", others["fragments"])
    check_flag("overlap", others["overlap"])
    if not isinstance(compress, str | Component):
        raise SpecError(
            "compress must be a gradient method such as 'ef(topk(0.01))', or 'mean', which is the "
            f"exact mean of the parameters; not {compress!r}",
            "compress",
        )
    step = None if outer is None else parse_outer_step(outer)
    aggregator = parse_aggregator(compress)
    parts: Parts = ((tuple(parameters), tuple(range(len(optimizers)))),)
    if len(schedules) > 1:
        parts = _divided(optimizers, parameters)
    fewest = min(len(names) for names, _ in parts)
    if not fewest:
        raise SpecError("an optimizer with a schedule of its own holds no trained parameter")
    if others["fragments"] > fewest:
        raise SpecError(
            f"fragments={others['fragments']}, but there are only {fewest} trained parameters to "
            "divide, and every fragment takes at least one"
        )
    method = LocalMethod(schedules, parts, horizon, aggregator, step, **others)
    if method.overlap and not method.plain:
        raise SpecError(
            "overlap=True goes with the plain average alone (compress='mean', outer=None), because "
            "the others begin the next round from its result"
        )
    return method


def _divided(optimizers: list[torch.optim.Optimizer], parameters: Parameters) -> Parts:
    """The parameters of each optimizer, which must be in no other one."""
    parts = []
    for index, optimizer in enumerate(optimizers):
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parts.append((tuple(name for name, p in parameters.items() if id(p) in held), (index,)))
    twice = Counter(name for names, _ in parts for name in names) - Counter(list(parameters))
    if twice:
        raise SpecError(
            f"parameter '{min(twice)}' is in two optimizers that have a schedule each, and it is "
            "averaged by one: give these optimizers one schedule"
        )
    return tuple(parts)


def check_no_hook(model: DistributedDataParallel) -> None:
    """Require a model without a communication hook, which local steps would never call."""
    owner = str(getattr(model, OWNER, ""))
    hooks = [getattr(hook, "__qualname__", "a hook") for hook, _ in model._comm_hooks]
    if owner.startswith(("torchcomp.register", "torchcomp.JointSpar")):
        hooks = [owner]
    if hooks:
        raise UnsupportedModelError(
            f"{hooks[0]} is already installed on this model, and local steps exchange no gradients "
            "that it could treat: build DistributedDataParallel without it. What goes together is "
            "torchcomp.LocalSGD(..., compress='ef(topk(0.01))'), which compresses the "
            "pseudo-gradients"
        )


def check_values(model: DistributedDataParallel) -> None:
    """Require parameters with dense values, which can be averaged."""
    for name, parameter in trained_parameters(model):
        if parameter.is_meta or parameter.layout != torch.strided:
            kind = "on the meta device" if parameter.is_meta else f"sparse ({parameter.layout})"
            raise UnsupportedModelError(
                f"parameter '{name}' is {kind}, and an average needs dense values: give it some "
                "before DistributedDataParallel(...)"
            )


def _check_optimizers(
    optimizers: list[torch.optim.Optimizer], model: DistributedDataParallel, two_levels: bool
) -> None:
    ours = {id(parameter) for parameter in model.parameters()}
    if not optimizers or len(set(map(id, optimizers))) < len(optimizers):
        raise SpecError("expected one torch.optim.Optimizer, or a list of different ones")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SpecError(f"expected a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise SpecError(
                f"{type(optimizer).__name__} wraps another optimizer and takes no hooks: give "
                "the optimizer inside it, and leave averaging to LocalSGD"
            )
        # By name, because to import its package compiles all functional optimizers.
        kinds = {each.__name__ for each in type(optimizer).__mro__}
        if not two_levels and "ZeroRedundancyOptimizer" in kinds:
            raise SpecError(
                "ZeroRedundancyOptimizer hands every rank's share of the parameters out at each "
                "step, so no rank takes local steps, and gradients are not reduced: give a plain "
                "torch.optim optimizer"
            )
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            raise SpecError(
                "the optimizer holds no parameter of this model: build it from model.parameters()"
            )


def check_no_other_scaler(
    optimizers: Sequence[torch.optim.Optimizer], scaler: torch.amp.GradScaler | None
) -> None:
    """Require, while an optimizer steps, that no GradScaler but `scaler` makes it step."""
    kinds = [torch.amp.GradScaler]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # An optimizer does not know who calls it, but a scaler that is at work knows its optimizers. To
    # look for all of them once takes some hundredths of a second, and patches nothing global.
    for found in gc.get_referrers(*kinds):
        if not isinstance(found, torch.amp.GradScaler) or found is scaler:
            continue
        states = vars(found).get("_per_optimizer_states", {})  # one that is switched off has none
        held = [states[id(optimizer)] for optimizer in optimizers if id(optimizer) in states]
        if any(state["stage"] != OptState.STEPPED for state in held):
            raise SpecError(
                "a GradScaler takes this step, and may skip others on some ranks only, which would "
                "shift their clocks: hand it over, torchcomp.LocalSGD(..., scaler=scaler)"
            )
