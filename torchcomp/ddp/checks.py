"""What torchcomp reads off a DDP model, and what it refuses before training.

Each check raises UnsupportedModelError, or SpecError for an argument, with what was wrong and why.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from torchcomp.bucket import Caps
from torchcomp.errors import SpecError, UnsupportedModelError

OWNER = "_torchcomp_owner"
"""Attribute of a DDP model that names what torchcomp has installed on it."""

KEEPS_ITS_HOOK = (
    "DDP cannot drop its hook: to train on, build DistributedDataParallel anew "
    "(handle.swap('mean') instead of close() is plain DDP)"
)
"""Why a model of a closed handle cannot go on, and what to do."""


def check_is_ddp(model: object) -> None:
    """Require a DistributedDataParallel model."""
    if not isinstance(model, DistributedDataParallel):
        raise UnsupportedModelError(
            "expected a torch.nn.parallel.DistributedDataParallel model, not "
            f"{type(model).__name__}{_way_to_ddp(model)}"
        )


def check_is_module(model: object) -> None:
    """Require a module."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected a torch.nn.Module, not {type(model).__name__}")


def check_scaler(scaler: object) -> None:
    """Require a GradScaler, or None."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise SpecError(f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")


def check_not_joined(model: DistributedDataParallel | None) -> None:
    """Require that DDP's ``join`` does not stand in for ranks; None is a model that is gone."""
    if model is not None and model._join_config.enable:
        raise UnsupportedModelError(
            "model.join() lets ranks run out of batches at different steps, and every exchange of "
            "torchcomp needs all of them: give every rank the same number of batches"
        )


def check_model(model: DistributedDataParallel) -> None:
    """Require a DDP model whose options and parameters torchcomp can serve."""
    _check_options(model)
    _check_free(model)
    for name, parameter in trained_parameters(model):
        if parameter.is_complex():
            raise UnsupportedModelError(
                f"parameter '{name}' is complex ({parameter.dtype}); compressors rank real "
                "magnitudes. Train on torch.view_as_real of it, or leave it to plain DDP"
            )
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise UnsupportedModelError(
                f"module '{name}' produces sparse gradients (sparse=True), and buckets are dense: "
                "build it with sparse=False"
            )


def check_before_backward(model: DistributedDataParallel) -> None:
    """Require that DDP has not reduced any gradient yet."""
    logger: Any = model.logger
    logger.set_runtime_stats_and_log()
    logged: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    # Which of the two appears first depends on static_graph.
    reduced = "prev_iteration_grad_ready_order_indices" in logged
    reduced |= logged.get("backward_comm_time_start", 0) > 0
    if reduced or model._has_rebuilt_buckets:
        raise UnsupportedModelError(
            "a backward pass has already run: register right after DistributedDataParallel(...), "
            "because DDP takes communication hooks only before it has reduced gradients"
        )


def trained_parameters(model: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """Name and parameter of everything whose gradient DDP reduces, in registration order."""
    ignored = model.parameters_to_ignore
    return [
        (name.replace("_orig_mod.", ""), parameter)
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]


def bucket_caps(model: DistributedDataParallel) -> Caps:
    """The sizes at which this model's groups are closed: DDP's ``bucket_cap_mb``."""
    default = bool(model.bucket_bytes_cap_default)
    rest = int(model.bucket_bytes_cap)
    return Caps(first=Caps().first if default else rest, rest=rest)


def _way_to_ddp(model: object) -> str:
    """How to come by a DDP model, as the end of an error."""
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        return ": call this on the DDP model, before torch.compile"
    if isinstance(model, FSDPModule | FullyShardedDataParallel):
        return (
            ": FSDP shards the model and reduces gradients by itself, and torchcomp serves "
            "replicas of a whole model"
        )
    if isinstance(model, nn.DataParallel):
        return (
            ": DataParallel is one process for all devices; start one for each with torchrun, and "
            "wrap DistributedDataParallel(model.module)"
        )
    if isinstance(model, nn.Module):
        return ": wrap the model first, model = DistributedDataParallel(model)"
    return ""


def _check_free(model: DistributedDataParallel) -> None:
    owner = getattr(model, OWNER, None)
    if any(getattr(state, "closed", False) for _, state in model._comm_hooks):
        raise UnsupportedModelError(f"{owner} was closed on this model, and {KEEPS_ITS_HOOK}")
    if owner is not None:
        raise UnsupportedModelError(
            f"{owner} is already installed on this model, and a model takes one method; "
            "handle.swap(spec) changes the method of a registered model, sync.close() ends local "
            "steps"
        )
    if model._comm_hooks:
        hook = getattr(model._comm_hooks[0][0], "__qualname__", "a hook")
        raise UnsupportedModelError(
            f"the model already has the communication hook '{hook}', and DDP takes one a model: "
            "do not register another one beside torchcomp"
        )


def _check_options(model: DistributedDataParallel) -> None:
    problems = {
        "DDP's own mixed_precision installs hooks of its own that replace the gradients: use "
        "torch.autocast in the forward pass instead": model.mixed_precision is not None,
        "torch._dynamo.config.optimize_ddp = 'python_reducer' reduces gradients without "
        "buckets: set it to 'ddp_optimizer', the default": model._use_python_reducer,
        "delay_all_reduce_named_params reduces these parameters past the hook: leave it "
        "out": model._delay_all_reduce_params,
        "skip_all_reduce_unused_params hides gradients from the hook: leave it "
        "out": model.skip_all_reduce_unused_params,
        "an optimizer runs inside the backward pass (_apply_optimizer_in_backward), before "
        "gradients are exchanged: step the optimizer after backward": any(
            hasattr(p, "_in_backward_optimizers") for p in model.module.parameters()
        ),
    }
    for problem, present in problems.items():
        if present:
            raise UnsupportedModelError(problem)
