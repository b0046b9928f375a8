"""The options of local steps: parse them, and refuse before training what cannot work."""

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
from torchcomp.auto import Auto
from torchcomp.bucket import Group
from torchcomp.checks import check_choice, check_count, check_flag
from torchcomp.component import Component
from torchcomp.ddp.arguments import check_scaler
from torchcomp.ddp.checks import OWNER, check_model, device_of, trained_parameters
from torchcomp.errors import SpecError, UnsupportedModelError
from torchcomp.exchange import Exchange, ProcessGroupExchange
from torchcomp.keys import check_seed
from torchcomp.local_sgd.outer_steps import OuterStep
from torchcomp.local_sgd.schedules import Every, Horizon, Schedule
from torchcomp.spec import parse_aggregator, parse_local, parse_outer_step

Specs = str | Component | Sequence[str | Component]
ProcessGroup = dist.ProcessGroup | DeviceMesh
Optimizers = Sequence[torch.optim.Optimizer]
Parameters = dict[str, nn.Parameter]
Parts = tuple[tuple[Group, tuple[int, ...]], ...]


@dataclass(frozen=True)
class LocalMethod:
    """The parsed options, with one schedule for all optimizers or one for each.

    Attributes:
        parts: for each schedule, the names of its parameters and the indices of the optimizers
            whose learning rates it reads.
        two_levels: whether DDP continues to reduce gradients inside each node.
        proposes: whether the schedule is ``"auto"``: averages after each step, and a proposal.
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
    proposes: bool = False

    @property
    def spec(self) -> str:
        """The schedules as one string."""
        return ", ".join(map(str, self.schedules))

    @property
    def plain(self) -> bool:
        """Whether a synchronisation is only the exact mean of the parameters."""
        return self.aggregator.transparent and self.outer is None

    def compared(self, parameters: Parameters) -> dict[str, Any]:
        """Return what must match on all ranks."""
        return {
            "spec": Auto.name if self.proposes else self.spec,
            "compress": self.aggregator,
            "outer": self.outer,
            "parameters": [(name, tuple(p.shape), p.dtype) for name, p in parameters.items()],
        }


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
    """Return the parsed options of this rank, and the values that must be equal on all ranks."""
    if not two_levels:
        _check_no_hook(model)
        if model.static_graph:
            raise UnsupportedModelError(
                "static_graph=True makes DDP expect a gradient all-reduce in its first backward "
                "pass, and local steps do none: build DistributedDataParallel without it"
            )
    check_model(model, or_registered=two_levels)
    check_values(model)
    _check_optimizers(optimizers, model, two_levels)
    check_scaler(scaler)
    parameters = dict(trained_parameters(model))
    method = _method(optimizers, parameters, two_levels=two_levels, **options)
    lrs = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    for reader in (*method.schedules, method.outer):
        _require(
            reader is None
            or not reader.reads_lr
            or all(isinstance(lr, Real | Tensor) for lr in lrs),
            f"{reader} reads the learning rate, but an optimizer has a parameter group whose 'lr' "
            "is not a number: use a schedule that does not read it, such as every(8)",
            "optimizer",
        )
    return method, method.compared(parameters)


def _method(
    optimizers: Optimizers,
    parameters: Parameters,
    spec: Specs,
    total_steps: int,
    warmup_steps: int,
    compress: Any,
    outer: str | OuterStep | None,
    **others: Any,
) -> LocalMethod:
    horizon = Horizon(total_steps, warmup_steps)
    each = isinstance(spec, list | tuple)
    specs: Sequence[Any] = spec if each else [spec]  # type: ignore[assignment]
    _require(
        not each or len(specs) == len(optimizers),
        f"{len(specs)} schedules for {len(optimizers)} optimizers: pass one schedule for all, or a "
        "list with one for each",
        "spec",
    )
    schedules = tuple(map(parse_local, specs))
    proposes = any(isinstance(schedule, Auto) for schedule in schedules)
    _require(
        not proposes or (len(schedules) == 1 and not others["overlap"]),
        "'auto' measures averages of the whole model, one after each step: pass it as the only "
        "schedule, without overlap=True",
        "spec",
    )
    chosen = tuple(Every(1) if isinstance(each, Auto) else each for each in schedules)
    for schedule in chosen:
        schedule.check(horizon)
    check_seed(others["seed"])
    check_choice("moments", others["moments"], ("local", "average", "reset"))
    check_count("fragments", others["fragments"])
    check_flag("overlap", others["overlap"])
    _require(
        isinstance(compress, str | Component),
        "compress must be a gradient method such as 'ef(topk(0.01))', or 'mean' for the exact mean "
        f"of the parameters, not {compress!r}",
        "compress",
    )
    aggregator = parse_aggregator(compress)
    step = None if outer is None else parse_outer_step(outer)
    everything: Parts = ((tuple(parameters), tuple(range(len(optimizers)))),)
    parts = everything if len(chosen) == 1 else _divided(optimizers, parameters)
    fewest = min(len(names) for names, _ in parts)
    _require(
        others["fragments"] <= fewest,
        f"fragments={others['fragments']}, but a schedule has only {fewest} trained parameters of "
        "the model to divide, and every fragment needs at least one: use fewer fragments, or leave "
        "out an optimizer that trains none",
        "fragments",
    )
    method = LocalMethod(chosen, parts, horizon, aggregator, step, proposes=proposes, **others)
    # A pseudo-gradient is measured from the averaged parameters, which must be complete by then.
    _require(
        method.plain or not method.overlap,
        "overlap=True works only with the plain average (compress='mean', outer=None), because "
        "pseudo-gradients need the result of the last average before the next round",
        "overlap",
    )
    return method


def _require(valid: bool, problem: str, field: str) -> None:
    if not valid:
        raise SpecError(problem, field)


def _divided(optimizers: Optimizers, parameters: Parameters) -> Parts:
    """The parameters of each optimizer, which must not share any."""
    held = [_held(optimizer) for optimizer in optimizers]
    for name, parameter in parameters.items():
        _require(
            sum(id(parameter) in ids for ids in held) <= 1,
            f"parameter '{name}' is in two optimizers with a schedule each, but only one schedule "
            "can average it: pass one schedule for all optimizers",
            "spec",
        )
    named = parameters.items()
    return tuple(
        (tuple(name for name, p in named if id(p) in ids), (i,)) for i, ids in enumerate(held)
    )


def _held(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def check_values(model: DistributedDataParallel) -> None:
    """Require parameters with dense values, which can be averaged."""
    for name, parameter in trained_parameters(model):
        if parameter.is_meta or parameter.layout != torch.strided:
            kind = "on the meta device" if parameter.is_meta else f"sparse ({parameter.layout})"
            raise UnsupportedModelError(
                f"parameter '{name}' is {kind}, and an average needs dense values: materialize it "
                "before DistributedDataParallel(...)"
            )


def _check_no_hook(model: DistributedDataParallel) -> None:
    """Require a model without a communication hook, which local steps would never call."""
    for hook, _ in model._comm_hooks:
        # The name of torchcomp's own hook means nothing to the user.
        own = hook.__module__.startswith("torchcomp.")
        name = getattr(model, OWNER, "") if own else getattr(hook, "__qualname__", "a hook")
        raise UnsupportedModelError(
            f"{name} is already installed on this model, but local steps exchange no "
            "gradients: build DistributedDataParallel without it. To compress pseudo-gradients, "
            "use torchcomp.LocalSGD(..., compress='ef(topk(0.01))'). Only with process_group can a "
            "method compress gradients, those inside a node"
        )


def _check_optimizers(
    optimizers: Optimizers, model: DistributedDataParallel, two_levels: bool
) -> None:
    names = ", ".join(type(each).__name__ for each in optimizers)
    # Optimizer.__init__ makes the hooks. Wrappers such as PostLocalSGDOptimizer do not call it.
    hooked = all(hasattr(each, "_optimizer_step_pre_hooks") for each in optimizers)
    _require(
        hooked and 0 < len(set(map(id, optimizers))) == len(optimizers),
        f"optimizer must be a torch.optim.Optimizer or a list of distinct ones, not {names or '[]'}"
        ". Of an optimizer that wraps another one, pass the inner one",
        "optimizer",
    )
    # Compared by name, because importing its package compiles all functional optimizers.
    kinds = {kind.__name__ for each in optimizers for kind in type(each).__mro__}
    _require(
        two_levels or "ZeroRedundancyOptimizer" not in kinds,
        "ZeroRedundancyOptimizer broadcasts each rank's shard of the parameters at every step, so "
        "ranks cannot take local steps: use a plain torch.optim optimizer",
        "optimizer",
    )
    ours = set(map(id, model.parameters()))
    _require(
        all(_held(each) & ours for each in optimizers),
        f"an optimizer ({names}) has no parameter of this model: build it from model.parameters()",
        "optimizer",
    )
