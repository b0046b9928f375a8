"""Options of local steps: parse them, and refuse before training what cannot work."""

import gc
import logging
import math
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
from torchcomp.auto import Auto
from torchcomp.bucket import Group
from torchcomp.checks import check_choice, check_count, check_flag, is_number
from torchcomp.component import Component
from torchcomp.ddp.arguments import check_scaler
from torchcomp.ddp.checks import OWNER, REGISTERED, check_model, device_of, trained_parameters
from torchcomp.errors import SpecError, UnsupportedModelError
from torchcomp.exchange import Exchange, ProcessGroupExchange
from torchcomp.keys import check_seed
from torchcomp.outer_steps import OuterStep
from torchcomp.schedules import Every, Horizon, Schedule
from torchcomp.spec import parse_aggregator, parse_local, parse_outer_step

Specs = str | Component | Sequence[str | Component]
ProcessGroup = dist.ProcessGroup | DeviceMesh
Parameters = dict[str, nn.Parameter]
_log = logging.getLogger(__package__)
_RARELY = 10
"""Below this many averages in the whole run, a schedule is probably a mistake."""

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
        mine = dist.get_process_group_ranks(model.process_group)
        others = dist.get_process_group_ranks(chosen)
        shared = sorted(set(mine) & set(others))
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


def check_arguments(
    model: DistributedDataParallel,
    optimizers: list[torch.optim.Optimizer],
    scaler: object,
    two_levels: bool,
    options: dict[str, Any],
) -> tuple[LocalMethod, dict[str, Any]]:
    """Parse this rank's arguments.

    Returns:
        The parsed options, and the values that must be equal on all ranks.
    """
    # Before check_model(), which refuses a hook as well but does not mention `compress`. With two
    # levels that advice would be wrong: DDP does reduce gradients.
    if not two_levels:
        check_no_hook(model)
    # The method of a registered model compresses the gradients inside the node.
    check_model(model, or_registered=two_levels)
    check_values(model)
    if model.static_graph and not two_levels:
        raise UnsupportedModelError(
            "static_graph=True makes DDP expect a gradient all-reduce in its first backward pass, "
            "and local steps do none: build DistributedDataParallel without it"
        )
    _check_optimizers(optimizers, model, two_levels)
    check_scaler(scaler)
    parameters = dict(trained_parameters(model))
    method = _method(optimizers, parameters, two_levels=two_levels, **options)
    readers = [each for each in (*method.schedules, method.outer) if each and each.reads_lr]
    for index, optimizer in enumerate(optimizers if readers else ()):
        if not all(isinstance(group.get("lr"), Real | Tensor) for group in optimizer.param_groups):
            raise SpecError(
                f"{readers[0]} reads the learning rate, but {type(optimizer).__name__} (optimizer "
                f"{index}) has a parameter group whose 'lr' is not a number: use a schedule that "
                "does not read it, such as every(8)",
                "optimizer",
            )
    shared = {
        "spec": Auto.name if method.proposes else method.spec,
        "compress": method.aggregator,
        "outer": method.outer,
        "parameters": [(name, tuple(p.shape), p.dtype) for name, p in parameters.items()],
    }
    return method, shared


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
    # `specs is spec` if the user passed a list. A single schedule serves any number of optimizers.
    if specs is spec and len(specs) != len(optimizers):
        raise SpecError(
            f"{len(specs)} schedules for {len(optimizers)} optimizers: pass one schedule for all, "
            "or a list with one for each"
        )
    parsed = tuple(map(parse_local, specs))
    proposes = any(isinstance(each, Auto) for each in parsed)
    if proposes and (len(parsed) > 1 or others["overlap"]):
        raise SpecError(
            "'auto' measures averages of the whole model, one after each step: pass it as the only "
            "schedule, without overlap=True",
            "spec",
        )
    schedules = tuple(Every(1) if isinstance(each, Auto) else each for each in parsed)
    for schedule in schedules:
        schedule.check(horizon)
    check_seed(others["seed"])
    check_choice("moments", others["moments"], ("local", "average", "reset"))
    check_count("fragments", others["fragments"])
    check_flag("overlap", others["overlap"])
    if not isinstance(compress, str | Component):
        raise SpecError(
            "compress must be a gradient method such as 'ef(topk(0.01))', or 'mean' for the exact "
            f"mean of the parameters, not {compress!r}",
            "compress",
        )
    step = None if outer is None else parse_outer_step(outer)
    aggregator = parse_aggregator(compress)
    parts: Parts = ((tuple(parameters), tuple(range(len(optimizers)))),)
    if len(schedules) > 1:
        parts = _divided(optimizers, parameters)
    fewest = min(len(names) for names, _ in parts)
    if not fewest:
        raise SpecError(
            "an optimizer with its own schedule has no trained parameter of the model: leave it "
            "out, or pass one schedule for all optimizers"
        )
    if others["fragments"] > fewest:
        raise SpecError(
            f"fragments={others['fragments']}, but only {fewest} trained parameters can be "
            "divided, and every fragment needs at least one: use fewer fragments"
        )
    method = LocalMethod(schedules, parts, horizon, aggregator, step, proposes=proposes, **others)
    # A pseudo-gradient is measured from the averaged parameters, which must be complete by then.
    if method.overlap and not method.plain:
        raise SpecError(
            "overlap=True works only with the plain average (compress='mean', outer=None), because "
            "pseudo-gradients need the result of the last average before the next round"
        )
    return method


def warn_if_rarely_averaged(
    method: LocalMethod, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Log a warning if a schedule hardly ever averages, even at the peak learning rate."""
    horizon = method.horizon
    for (_, indices), schedule in zip(method.parts, method.schedules, strict=True):
        groups = [group for index in indices for group in optimizers[index].param_groups]
        # torch's schedulers store the peak in one of the first two. "lr" can be that of warm-up.
        lrs = [group.get(key) for group in groups for key in ("max_lr", "initial_lr", "lr")]
        peak = max((lr for lr in lrs if is_number(lr)), default=0.0)
        if not schedule.reads_lr or peak <= 0:
            continue
        warmup, total = horizon.warmup_steps, horizon.total_steps
        longest = schedule.period(warmup, peak, horizon)
        shortest = schedule.period(warmup, math.inf, horizon)
        # Rounded up. In the run it is less often, as rounds grow with the decay.
        syncs = -(-warmup // shortest) - (-(total - warmup) // longest)
        if longest > shortest and syncs < _RARELY:
            _log.warning(
                "'%s' averages at most %d times in the %d steps of the run: at the peak learning "
                "rate %g a round takes %d steps. Compare its coefficient with the learning rate",
                schedule,
                syncs,
                total,
                peak,
                longest,
            )


def _divided(optimizers: list[torch.optim.Optimizer], parameters: Parameters) -> Parts:
    """The parameters of each optimizer, which must not share any."""
    parts = []
    for index, optimizer in enumerate(optimizers):
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parts.append((tuple(name for name, p in parameters.items() if id(p) in held), (index,)))
    twice = Counter(name for names, _ in parts for name in names) - Counter(list(parameters))
    if twice:
        raise SpecError(
            f"parameter '{min(twice)}' is in two optimizers with a schedule each, but only one "
            "schedule can average it: pass one schedule for all optimizers"
        )
    return tuple(parts)


def check_no_hook(model: DistributedDataParallel) -> None:
    """Require a model without a communication hook, which local steps would never call."""
    owner = str(getattr(model, OWNER, ""))
    hooks = [getattr(hook, "__qualname__", "a hook") for hook, _ in model._comm_hooks]
    # torchcomp's own hook is a function whose name means nothing to the user.
    if owner.startswith((REGISTERED, "torchcomp.JointSpar")):
        hooks = [owner]
    if hooks:
        raise UnsupportedModelError(
            f"{hooks[0]} is already installed on this model, but local steps exchange no "
            "gradients: build DistributedDataParallel without it. To compress pseudo-gradients, "
            "use torchcomp.LocalSGD(..., compress='ef(topk(0.01))'). Only with process_group can a "
            "method compress gradients, those inside a node"
        )


def check_values(model: DistributedDataParallel) -> None:
    """Require parameters with dense values, which can be averaged."""
    for name, parameter in trained_parameters(model):
        if parameter.is_meta or parameter.layout != torch.strided:
            kind = "on the meta device" if parameter.is_meta else f"sparse ({parameter.layout})"
            raise UnsupportedModelError(
                f"parameter '{name}' is {kind}, and an average needs dense values: materialize it "
                "before DistributedDataParallel(...)"
            )


def _check_optimizers(
    optimizers: list[torch.optim.Optimizer], model: DistributedDataParallel, two_levels: bool
) -> None:
    ours = {id(parameter) for parameter in model.parameters()}
    if not optimizers or len(set(map(id, optimizers))) < len(optimizers):
        raise SpecError(
            "optimizer must be a torch.optim.Optimizer or a list of distinct ones, not "
            f"{[type(each).__name__ for each in optimizers]}"
        )
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SpecError(
                f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
            )
        # Set by Optimizer.__init__, which a wrapper such as PostLocalSGDOptimizer does not call.
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            held = vars(optimizer).items()
            inner = [name for name, each in held if isinstance(each, torch.optim.Optimizer)]
            raise SpecError(
                f"{type(optimizer).__name__} wraps another optimizer and has no step hooks: pass "
                f"the inner optimizer (optimizer.{inner[0] if inner else '...'}), and leave "
                "averaging to LocalSGD"
            )
        # Compared by name, because importing its package compiles all functional optimizers.
        kinds = {each.__name__ for each in type(optimizer).__mro__}
        if not two_levels and "ZeroRedundancyOptimizer" in kinds:
            raise SpecError(
                "ZeroRedundancyOptimizer broadcasts each rank's shard of the parameters at every "
                "step, so ranks cannot take local steps: use a plain torch.optim optimizer"
            )
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            raise SpecError(
                f"{type(optimizer).__name__} has no parameter of this model: build the optimizer "
                "from model.parameters()"
            )


def check_no_other_scaler(
    optimizers: Sequence[torch.optim.Optimizer], scaler: torch.amp.GradScaler | None
) -> None:
    """Require that no GradScaler except `scaler` is calling the current optimizer step."""
    kinds = [torch.amp.GradScaler]
    for kind in kinds:
        kinds += kind.__subclasses__()  # the list grows during the loop: subclasses of subclasses
    # An optimizer has no reference to its scaler, but a scaler records the optimizers that it has
    # unscaled. Searching all scalers once takes some hundredths of a second. Patching
    # GradScaler.step instead would affect scalers of other loops.
    for found in gc.get_referrers(*kinds):
        if not isinstance(found, torch.amp.GradScaler) or found is scaler:
            continue
        states = vars(found).get("_per_optimizer_states", {})  # a disabled scaler has none
        active = [states[id(optimizer)] for optimizer in optimizers if id(optimizer) in states]
        # STEPPED lasts until scaler.update(): that call of step() is already over.
        if any(state["stage"] != OptState.STEPPED for state in active):
            raise SpecError(
                "a GradScaler that was not passed to LocalSGD takes this optimizer step. It can "
                "skip steps on some ranks only: use torchcomp.LocalSGD(..., scaler=scaler)"
            )
