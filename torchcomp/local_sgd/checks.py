"""What local steps require of their arguments, and refuse with the reason before training."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchcomp.aggregators import Aggregator
from torchcomp.checks import check_choice, check_count, check_flag
from torchcomp.component import Component
from torchcomp.ddp.checks import OWNER, check_model, check_scaler, trained_parameters
from torchcomp.errors import SpecError, UnsupportedModelError
from torchcomp.keys import check_seed
from torchcomp.local_sgd.moments import MOMENTS
from torchcomp.outer_steps import OuterStep
from torchcomp.schedules import Horizon, Schedule
from torchcomp.spec import parse_aggregator, parse_outer_step, parse_schedule

Specs = str | Component | Sequence[str | Component]


@dataclass(frozen=True)
class Options:
    """The options of local steps as a user gave them; see :class:`torchcomp.LocalSGD`."""

    spec: Specs
    total_steps: int
    warmup_steps: int
    compress: str | Component
    outer: str | OuterStep | None
    moments: str
    fragments: int
    overlap: bool
    seed: int


@dataclass(frozen=True)
class LocalMethod:
    """What the options come to.

    Attributes:
        schedules: when to synchronise; one for all optimizers, or one each.
        horizon: ends of warm-up and run.
        aggregator: how changes of the parameters are averaged.
        outer: what follows the average; None is nothing.
        moments: what becomes of the optimizers' state.
        fragments: pieces that the parameters of a schedule are cut into.
        overlap: whether the average goes on beside what follows the optimizer's turn.
    """

    schedules: tuple[Schedule, ...]
    horizon: Horizon
    aggregator: Aggregator
    outer: OuterStep | None
    moments: str
    fragments: int
    overlap: bool

    @property
    def plain(self) -> bool:
        """Whether a synchronisation is the exact mean of the parameters, and nothing else."""
        return self.aggregator.transparent and self.outer is None


def check_arguments(
    model: DistributedDataParallel,
    optimizers: object,
    options: Options,
    scaler: object,
    two_levels: bool,
) -> tuple[LocalMethod, dict[str, Any]]:
    """What this rank's arguments come to, and the facts that all ranks must share.

    Raises:
        SpecError: if an argument cannot be used.
        UnsupportedModelError: if the model cannot.
    """
    if not two_levels:
        _check_no_gradient_method(model)
    check_model(model)
    check_values(model)
    if model.static_graph and not two_levels:
        raise UnsupportedModelError(
            "static_graph=True makes DDP expect an exchange in its first backward pass, and local "
            "steps exchange no gradients: build DistributedDataParallel without it"
        )
    _check_optimizers(optimizers, model, two_levels)
    check_scaler(scaler)
    method = _method(options, as_list(optimizers))
    _check_rates(method, as_list(optimizers))
    parameters = dict(trained_parameters(model))
    _check_division(method, as_list(optimizers), parameters)
    facts = {
        "spec": ", ".join(map(str, method.schedules)),
        "compress": method.aggregator,
        "outer": method.outer,
        "parameters": [(name, tuple(p.shape), p.dtype) for name, p in parameters.items()],
    }
    return method, facts


def as_list(optimizers: object) -> list[torch.optim.Optimizer]:
    """One optimizer, or several, as a list; checked elsewhere."""
    return list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]  # type: ignore[list-item]


def held_by(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> tuple[str, ...]:
    """Names of those of the parameters that an optimizer holds, in their order."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return tuple(name for name, parameter in parameters.items() if id(parameter) in held)


def rates_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Any]:
    """The learning rates of the parameter groups that have a number as rate."""
    rates = (group.get("lr") for each in optimizers for group in each.param_groups)
    return [rate for rate in rates if isinstance(rate, Real | Tensor)]


def _check_rates(method: LocalMethod, optimizers: list[torch.optim.Optimizer]) -> None:
    """Require learning rates where a schedule or the outer step reads them."""
    reader = next(
        (each for each in (*method.schedules, method.outer) if each and each.reads_rate), None
    )
    for place, optimizer in enumerate(optimizers):
        if reader is not None and len(rates_of([optimizer])) < len(optimizer.param_groups):
            raise SpecError(
                f"{reader} reads the learning rate, and {type(optimizer).__name__} (optimizer "
                f"{place}) has a parameter group without a number as 'lr': take a schedule that "
                "reads none, such as every(8)",
                "optimizer",
            )


def _check_compress(compress: object) -> None:
    if not isinstance(compress, str | Component):
        raise SpecError(
            "compress must be a gradient method such as 'ef(topk(0.01))', or 'mean', which is the "
            f"exact mean of the parameters; not {compress!r}",
            "compress",
        )


def _method(options: Options, optimizers: list[torch.optim.Optimizer]) -> LocalMethod:
    horizon = Horizon(options.total_steps, options.warmup_steps)
    given = options.spec if isinstance(options.spec, list | tuple) else [options.spec]
    if isinstance(options.spec, list | tuple) and len(given) != len(optimizers):
        raise SpecError(
            f"{len(given)} schedules for {len(optimizers)} optimizers: give one schedule for all, "
            "or a list with one for each optimizer"
        )
    schedules = tuple(map(parse_schedule, given))
    for schedule in schedules:
        schedule.check(horizon)
    check_seed(options.seed)
    check_choice("moments", options.moments, MOMENTS)
    check_count("fragments", options.fragments)
    check_flag("overlap", options.overlap)
    _check_compress(options.compress)
    method = LocalMethod(
        schedules,
        horizon,
        parse_aggregator(options.compress),
        None if options.outer is None else parse_outer_step(options.outer),
        options.moments,
        options.fragments,
        options.overlap,
    )
    if method.overlap and not method.plain:
        raise SpecError(
            "overlap=True goes with the plain average alone (compress='mean', outer=None), because "
            "the others begin the next round from its result"
        )
    return method


def _check_division(
    method: LocalMethod,
    optimizers: list[torch.optim.Optimizer],
    parameters: dict[str, nn.Parameter],
) -> None:
    """Require that every schedule has parameters of its own, enough for its fragments."""
    parts = [tuple(parameters)]
    if len(method.schedules) > 1:
        parts = [held_by(optimizer, parameters) for optimizer in optimizers]
        names = [name for part in parts for name in part]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SpecError(
                f"parameter '{twice[0]}' is in two optimizers that have a schedule each, and it is "
                "averaged by one: give these optimizers one schedule"
            )
    fewest = min(map(len, parts))
    if not fewest:
        raise SpecError("an optimizer with a schedule of its own holds no trained parameter")
    if method.fragments > fewest:
        raise SpecError(
            f"fragments={method.fragments}, but there are only {fewest} trained parameters to "
            "divide, and every fragment takes at least one"
        )


def _check_no_gradient_method(model: DistributedDataParallel) -> None:
    owner = str(getattr(model, OWNER, ""))
    if owner.startswith(("torchcomp.register", "torchcomp.JointSpar")):
        raise _useless(owner)
    if not owner:
        check_no_hook(model)


def check_no_hook(model: DistributedDataParallel) -> None:
    """Require a model without a communication hook, which local steps would never call.

    Raises:
        UnsupportedModelError: naming the hook.
    """
    if model._comm_hooks:
        raise _useless(getattr(model._comm_hooks[0][0], "__qualname__", "a hook"))


def _useless(hook: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{hook} is already installed on this model, and local steps exchange no gradients "
        "that it could treat: build DistributedDataParallel without it. What goes together is "
        "torchcomp.LocalSGD(..., compress='ef(topk(0.01))'), which compresses the changes of "
        "the parameters"
    )


def check_values(model: DistributedDataParallel) -> None:
    """Require parameters with dense values, which can be averaged.

    Raises:
        UnsupportedModelError: naming one that has none.
    """
    for name, parameter in trained_parameters(model):
        if parameter.is_meta or parameter.layout != torch.strided:
            kind = "on the meta device" if parameter.is_meta else f"sparse ({parameter.layout})"
            raise UnsupportedModelError(
                f"parameter '{name}' is {kind}, and an average needs dense values: give it some "
                "before DistributedDataParallel(...)"
            )


def _check_optimizers(optimizers: object, model: DistributedDataParallel, two_levels: bool) -> None:
    ours = {id(parameter) for parameter in model.parameters()}
    given = as_list(optimizers)
    if not given or len({id(optimizer) for optimizer in given}) < len(given):
        raise SpecError("expected one torch.optim.Optimizer, or a list of different ones")
    for optimizer in given:
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
