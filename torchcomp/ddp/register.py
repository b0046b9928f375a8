"""register_ddp: install compressed gradient exchange on a DDP model; the options of all models."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from torchcomp.aggregators import Aggregator, Mean, planned_two_levels
from torchcomp.aggregators.rehearsal import rehearse_all
from torchcomp.checkpoints.redistribution import Place
from torchcomp.ddp import checks
from torchcomp.ddp.buckets import Buckets
from torchcomp.ddp.executors import transport
from torchcomp.ddp.hook import DDPHandle, hook
from torchcomp.ddp.loop import OptimizerLRs, Optimizers
from torchcomp.ddp.managed import Managed, check_manager
from torchcomp.ddp.two_level import TwoLevel
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import BucketShape, partition
from torchcomp.engine.keys import check_seed
from torchcomp.engine.stats import sent_instead
from torchcomp.exchange import InProcessExchange, ProcessGroupExchange
from torchcomp.exchange.nodes import Nodes
from torchcomp.exchange.traffic import Traffic
from torchcomp.routes import wire
from torchcomp.specs.auto import Auto
from torchcomp.specs.checks import check_choice, check_flag
from torchcomp.specs.component import Component
from torchcomp.specs.errors import SpecError, UnsupportedModelError
from torchcomp.specs.spec import candidates, parse_registered

if TYPE_CHECKING:
    from torchcomp.guard import Guard

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """The keyword arguments of :func:`torchcomp.register`, which describes them."""

    seed: int = 0
    scaler: "torch.amp.GradScaler | None" = None
    check: str = "auto"
    lr_inside: Optimizers | None = None
    nodes: str | int | DeviceMesh | None = None
    inside: str | None = None
    replicate: DeviceMesh | None = None
    manager: Any = None
    guard: "Guard | bool" = False
    checksum: bool = False

    def compared(self, spec: str | Component) -> dict[str, Any]:
        values = {"spec": spec, **vars(self)}
        del values["scaler"]
        for name in ("lr_inside", "replicate", "manager"):  # each rank has its own
            values[name] = "none" if values[name] is None else "set"
        if isinstance(self.nodes, DeviceMesh):
            values["nodes"] = "a DeviceMesh"
        return values

    def require_valid(self) -> None:
        check_seed(self.seed)
        check_scaler(self.scaler)
        if self.guard is not None and self.guard is not False:
            from torchcomp.guard import Guard

            Guard.of(self.guard)
        check_flag("checksum", self.checksum)
        # "step" is the name that "now" had before.
        check_choice("check", self.check, ("auto", "now", "late", "step"))
        if self.inside is not None:
            check_choice("inside", self.inside, ("bf16",))
            if self.nodes is None:
                raise SpecError("inside is for nodes: pass nodes", "inside")
        if self.manager is not None:
            check_manager(self.manager)
            if self.check == "late":
                raise SpecError("check='late' does not fit a manager. Use check='now'", "check")
            for name in ("nodes", "replicate"):
                if getattr(self, name) is not None:
                    raise SpecError(f"{name} does not fit manager, whose ranks come and go", name)

    def averager_of(self, aggregator: Aggregator, device: torch.device) -> Callable[..., Averager]:
        """Return what makes an averager of an exchange, parameters by name, and groups."""
        options: dict[str, Any] = {"seed": self.seed, "checksum": self.checksum}
        options["takes_back"] = alone = self.manager is None
        late = self.check == "late" or (self.check == "auto" and device.type != "cpu" and alone)
        return partial(Averager, aggregator, late=late, **options)

    def lrs(self, parameters: Mapping[str, torch.Tensor]) -> OptimizerLRs | None:
        return None if self.lr_inside is None else OptimizerLRs(self.lr_inside, parameters)


def check_scaler(scaler: object) -> None:
    """Require a GradScaler, or None."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise SpecError(f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")


def register_ddp(
    model: DistributedDataParallel, spec: str | Component, options: Options
) -> DDPHandle:
    """Install compressed gradient exchange on a DDP model; see :func:`torchcomp.register`."""
    # First: without DDP, there is no process group in which the ranks could verify anything.
    checks.check_is_ddp(model)
    device = checks.device_of(model)
    # With a manager, ranks register when they join, and the first step compares them. Otherwise,
    # verify in DDP's own group: creating one would hang if another rank has already raised.
    everyone: ProcessGroupExchange | InProcessExchange = InProcessExchange.alone(device)
    if options.manager is None:
        everyone = ProcessGroupExchange(model.process_group, device)
    check = partial(_check, model, spec, options, everyone.global_ranks)
    methods, groups, lrs, nodes, auto = everyone.build(
        "torchcomp.register", options.compared(spec), check
    )
    aggregator = methods[0]
    parameters = dict(checks.trained_parameters(model))
    make = options.averager_of(aggregator, device)
    buckets: Buckets
    if isinstance(everyone, InProcessExchange):
        buckets = Managed(make, parameters, groups, options.manager, device)
    elif nodes is not None:
        inside = None if options.inside is None else torch.bfloat16
        buckets = TwoLevel(make, parameters, groups, nodes, everyone, inside)
    else:
        exchange, executor = transport(model.process_group, device)
        averager, place = make(exchange, parameters, groups), Place.in_order(everyone.rank)
        buckets = Buckets(averager, everyone, place, parameters, [executor])
    if options.guard:
        from torchcomp.guard import watch

        # All parameters that the ranks have in common, frozen ones as well.
        common = dict(checks.named(model.module, model.parameters_to_ignore))
        watch(buckets.averager, options.guard, common)
    if auto is None:
        handle = DDPHandle(model, buckets, options.scaler, lrs)
    else:
        from torchcomp.advisor.auto import AutoHandle

        handle = AutoHandle(methods, auto.steps, model, buckets, options.scaler, lrs)
    # A plain function with the handle as its state: DDP refuses partials and callable objects.
    model.register_comm_hook(handle, hook)
    setattr(model, checks.OWNER, f"{checks.REGISTERED}('{auto or aggregator}')")
    # On one rank only: the messages would be the same on all ranks.
    if everyone.rank == 0:
        size = 1 if nodes is None else nodes.size
        shapes = [BucketShape.of(group, buckets.parameters) for group in buckets.averager.buckets]
        planned = planned_two_levels(aggregator, shapes, everyone.world_size, size)
        log_method(buckets, planned, f"nodes of {size} ranks" if size > 1 else "")
    return handle


def log_method(buckets: Buckets, planned: Traffic, between: str) -> None:
    """Log what was registered, and warn if what the method does not send is lost."""
    averager = buckets.averager
    aggregator, warmup_steps = averager.aggregator, averager.aggregator.stages[-1]
    _log.info(
        "registered %s: %d parameters with %s elements, groups: %d, per step%s%s %s",
        aggregator,
        len(averager.parameters),
        f"{sum(each.numel() for each in buckets.parameters.values()):,}",
        len(averager.buckets),
        f" after the first {warmup_steps:,}" if warmup_steps else "",
        f" between {between}" if between else "",
        sent_instead(planned.sent, planned.dense),
    )
    if isinstance(aggregator, Mean) and aggregator.loses:
        _log.warning(
            "%s keeps no residual, so what it does not send is lost. Use ef(%s) to send it later",
            aggregator,
            aggregator.compressor,
        )


def _check(
    model: DistributedDataParallel, spec: str | Component, options: Options, ranks: Sequence[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (methods, groups, learning rates, nodes, auto), and what must match on all ranks."""
    if options.replicate is not None:
        raise SpecError("replicate is for a model of fully_shard: leave it out", "replicate")
    options.require_valid()
    ranks_of_ddp = model.process_group.size()
    if options.manager is not None and ranks_of_ddp != 1:
        raise UnsupportedModelError(
            f"with a manager, DDP's process group has one rank, not {ranks_of_ddp}: build "
            "torch.nn.parallel.DistributedDataParallel(net, process_group=ProcessGroupDummy(0, 1))"
        )
    checks.check_model(model)
    if options.check == "late" and model.find_unused_parameters and not model.static_graph:
        raise SpecError("with find_unused_parameters=True, use check='now'", "check")
    checks.check_before_backward(model)
    parsed = parse_registered(spec)
    auto = parsed if isinstance(parsed, Auto) else None
    if auto is not None and options.manager is not None:
        raise SpecError("auto times methods among ranks that stay: register one with a manager")
    methods = [parsed] if not isinstance(parsed, Auto) else candidates(parsed)
    trained = checks.trained_parameters(model)
    # An error in it must be raised on all ranks.
    for method in methods:
        rehearse_all(method, [parameter for _, parameter in trained])
    groups = partition(trained, checks.bucket_caps(model))
    lrs = options.lrs(dict(trained))
    divided = None if options.nodes is None else Nodes.of(options.nodes, ranks)
    values = {
        "spec": auto or methods[0],
        "nodes": divided and divided.ranks,
        # With names: DDP itself verifies only the shapes.
        "parameters": [(name, tuple(p.shape), p.dtype) for name, p in trained],
        "groups": groups,
        "wire version": wire.VERSION,  # ranks can run different versions of torchcomp
    }
    # One rank on each node: there is nothing to average inside.
    two_levels = divided if divided is not None and divided.size > 1 else None
    return (methods, groups, lrs, two_levels, auto), values
