"""Checks of a DDP model, which raise UnsupportedModelError, and settings that are read from it."""

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from torchcomp.engine.bucket import DEFAULT_CAPS, Caps
from torchcomp.specs.errors import UnsupportedModelError

OWNER = "_torchcomp_owner"  # attribute of a DDP model: what torchcomp has installed on it
REGISTERED = "torchcomp.register"  # how that begins where the gradients are compressed
AFTER_CLOSE = (
    "DDP cannot remove its communication hook. To continue training, wrap the module in a new "
    "DistributedDataParallel. To get plain DDP, call handle.swap('mean') instead of close()"
)


def check_is_ddp(model: object) -> None:
    """Require a DistributedDataParallel model of torch."""
    # torchft's class derives from it, and installs its own hook.
    torchfts = type(model).__module__.partition(".")[0] == "torchft"
    if not isinstance(model, DistributedDataParallel) or torchfts:
        raise UnsupportedModelError(
            "expected a torch.nn.parallel.DistributedDataParallel model, not "
            f"{type(model).__name__}. {_how_to_wrap(model)}"
        )


def check_is_module(model: object) -> None:
    """Require a torch.nn.Module."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected a torch.nn.Module, not {type(model).__name__}")


def check_not_joined(model: DistributedDataParallel | None) -> None:
    """Require that DDP's ``join`` is not in use. None stands for a model that was deleted."""
    if model is not None and model._join_config.enable:
        problem = "model.join() is not supported: give every rank the same number of batches"
        raise UnsupportedModelError(problem)


def check_model(model: DistributedDataParallel, *, or_registered: bool = False) -> None:
    """Require a DDP model with supported options and parameters, and without another hook.

    With `or_registered`, it may have that of torchcomp.register, unless it is closed.
    """
    _check_options(model)
    _check_free(model, or_registered)
    first_on: dict[torch.device, str] = {}
    for name, parameter in trained_parameters(model):
        first_on.setdefault(parameter.device, name)
        check_real(name, parameter)
    if len(first_on) > 1:
        listed = ", ".join(f"'{name}' on {device}" for device, name in first_on.items())
        raise UnsupportedModelError(
            f"the model is on {len(first_on)} devices ({listed}). Put it on one, or use plain DDP"
        )
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise UnsupportedModelError(
                f"module '{name}' produces sparse gradients (sparse=True): pass sparse=False"
            )


def check_real(name: str, parameter: Tensor) -> None:
    """Require a parameter that is not complex."""
    if parameter.is_complex():
        raise UnsupportedModelError(
            f"parameter '{name}' is complex ({parameter.dtype}): use torch.view_as_real of it"
        )


def check_before_backward(model: DistributedDataParallel) -> None:
    """Require that DDP has not reduced any gradient yet."""
    # DDP has no flag for this. Its logged statistics show it.
    logger: Any = model.logger
    logger.set_runtime_stats_and_log()
    logged: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    # Both fields: static_graph decides which of them DDP fills first.
    reduced = "prev_iteration_grad_ready_order_indices" in logged
    reduced |= logged.get("backward_comm_time_start", 0) > 0
    if reduced or model._has_rebuilt_buckets:
        raise UnsupportedModelError(
            "a backward pass has already run on this model, and DDP takes no hook after that. "
            "Register right after DistributedDataParallel(...)"
        )


def check_not_sharded(model: nn.Module) -> None:
    """Require that ``fully_shard`` has not taken parameters from DDP."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise UnsupportedModelError(
            "fully_shard was called after torchcomp.register, so DDP no longer sees gradients. "
            "Leave out DDP: shard first, then call torchcomp.register(module, spec, replicate=...)"
        )


def trained_parameters(model: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) pairs of what DDP reduces, in registration order."""
    return trained(model.module, model.parameters_to_ignore)


def trained(module: nn.Module, ignored: Container[str] = ()) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) pairs of what needs a gradient, in registration order."""
    return [(name, each) for name, each in named(module, ignored) if each.requires_grad]


def named(module: nn.Module, ignored: Container[str] = ()) -> list[tuple[str, nn.Parameter]]:
    """Return all (name, parameter) pairs but those that are ignored, in registration order."""
    # Without the `_orig_mod.` of torch.compile: a checkpoint then fits the plain model as well.
    pairs = module.named_parameters()
    return [(name.replace("_orig_mod.", ""), each) for name, each in pairs if name not in ignored]


def device_of(model: DistributedDataParallel) -> torch.device:
    """Return the device of what DDP reduces, or of the other parameters if it reduces nothing."""
    trained = [parameter for _, parameter in trained_parameters(model)]
    # The meta device has no collectives, which raising on every rank takes.
    devices = (p.device for p in (*trained, *model.module.parameters()) if not p.is_meta)
    return next(devices, torch.device("cpu"))


def bucket_caps(model: DistributedDataParallel) -> Caps:
    """Return the bucket sizes that the model was built with, such as DDP's ``bucket_cap_mb``."""
    # DDP has a smaller first bucket, but only if the user did not pass a size.
    first = DEFAULT_CAPS[:1] if model.bucket_bytes_cap_default else ()
    listed = tuple(getattr(model, "bucket_bytes_cap_list", ()))  # none in torch 2.6
    return listed or (*first, int(model.bucket_bytes_cap))


def _how_to_wrap(model: object) -> str:
    # From the most specific class to the least: all of these are nn.Modules.
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        return "Call this on the DDP model, before torch.compile"
    if isinstance(model, nn.Module) and any(isinstance(m, FSDPModule) for m in model.modules()):
        return (
            "To compress what replicas of FSDP2 exchange, shard the whole model over one dimension "
            'of a mesh, and call torchcomp.register(model, spec, replicate=mesh["replicate"])'
        )
    if isinstance(model, FullyShardedDataParallel):
        return "In place of FSDP1, use fully_shard and torchcomp.register(..., replicate=...)"
    if isinstance(model, nn.DataParallel):
        return (
            "DataParallel runs all devices in one process. Start one process per device with "
            "torchrun, and wrap DistributedDataParallel(model.module)"
        )
    wrap = "Wrap it first: model = DistributedDataParallel(model). "
    return (
        f"{wrap if isinstance(model, nn.Module) else ''}For Lightning, Accelerate and other "
        "frameworks, see docs/integrations/README.md"
    )


def _check_free(model: DistributedDataParallel, or_registered: bool) -> None:
    owner = getattr(model, OWNER, None)
    # A closed handle first: its model still has an owner, but needs other advice.
    if any(getattr(state, "closed", False) for _, state in model._comm_hooks):
        raise UnsupportedModelError(f"{owner} was closed on this model. {AFTER_CLOSE}")
    if or_registered and str(owner).startswith(REGISTERED):
        return
    if owner is not None:
        raise UnsupportedModelError(
            f"{owner} is already installed on this model. To change the method, use "
            "handle.swap(spec); to end local steps, sync.close(). To compress inside the groups of "
            "LocalSGD(..., process_group=...), call torchcomp.register first"
        )
    if model._comm_hooks:
        hook = getattr(model._comm_hooks[0][0], "__qualname__", "a hook")
        raise UnsupportedModelError(f"the model has the communication hook '{hook}' already")


def _check_options(model: DistributedDataParallel) -> None:
    # Each of these makes gradients bypass the hook, or changes them outside of it.
    in_backward = any(hasattr(p, "_in_backward_optimizers") for p in model.module.parameters())
    problems = {
        "mixed_precision: use torch.autocast instead": model.mixed_precision is not None,
        "optimize_ddp = 'python_reducer': set 'ddp_optimizer'": model._use_python_reducer,
        "delay_all_reduce_named_params: leave it out": model._delay_all_reduce_params,
        # Unused parameters are hidden from the hook; not in torch 2.6.
        "skip_all_reduce_unused_params: leave it out": getattr(
            model, "skip_all_reduce_unused_params", False
        ),
        "_apply_optimizer_in_backward: step the optimizer after backward": in_backward,
    }
    for problem, present in problems.items():
        if present:
            raise UnsupportedModelError(f"with this, gradients bypass the hook of DDP: {problem}")
