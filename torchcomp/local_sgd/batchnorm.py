"""reestimate_batchnorm: BatchNorm statistics for averaged weights."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from torchcomp.checkpoints.checkpoint import digest_of, listed
from torchcomp.ddp.checks import check_is_module
from torchcomp.engine.nonfinite import all_finite
from torchcomp.exchange import ProcessGroupExchange
from torchcomp.local_sgd.averages import exact_mean
from torchcomp.specs.checks import check_count
from torchcomp.specs.errors import NonFiniteError, SpecError

Layers = dict[str, _BatchNorm]

_ADVICE = (
    "Nothing was changed. All ranks need the averaged weights and enough images: call it between "
    "rounds (LocalSGD's next_sync is None), with each rank's own shard of the training set."
)


def reestimate_batchnorm(model: nn.Module, loader: Iterable[Any], images: int = 4096) -> None:
    """Re-estimate the running mean and variance of every BatchNorm layer, before an evaluation.

    The mean of statistics of different weights fits the averaged weights only approximately. As in
    Gu et al., ICLR 2024 (arXiv 2310.14423), every rank therefore

    1. runs `model` in training mode, without gradients, on batches of its own shard of the
       training set, augmented as in training;
    2. takes the mean of the batches' statistics;
    3. averages running mean and variance over the ranks, in float32 or wider.

    Without torch.distributed, step 3 is skipped. With it, all ranks must call this function
    together, between rounds (``sync.next_sync is None``). The statistics do not change in layers
    that ``model.train()`` leaves in evaluation mode (frozen layers), in layers that no batch
    reaches, and in any layer if there is an error.

    Args:
        model: the module, or the DDP model around it. The process group is that of the DDP model,
            or else the default one. Call this function under the same autocast as training.
        loader: yields tensors of images (n, ...), or tuples or lists that begin with one, on any
            device. Each rank passes its own shard.
        images: number of images of all ranks together. Each rank takes whole batches until it has
            seen ``ceil(images / ranks)`` images.

    Raises:
        SpecError: if an argument or a batch has the wrong type, or if the loader ends before this
            rank has seen its share of the images.
        NonFiniteError: if statistics are not finite.
        UnsupportedModelError: if `model` is not a module.
        RankMismatchError: on all ranks, if their parameters or layers differ, or if only some of
            them fail.
    """
    check_is_module(model)
    module, group = model, None
    inner = getattr(model, "_orig_mod", model)  # torch.compile(ddp_model) wraps the DDP model
    if isinstance(inner, DistributedDataParallel):
        # DDP's forward broadcasts buffers. It would wait for a rank that has no batch left.
        module, group = inner.module, inner.process_group
    with _fresh_statistics(module) as layers:
        if not layers:
            return
        statistics = statistics_of(layers)
        device = next(iter(statistics.values())).device
        if not dist.is_initialized():
            _forward_passes(module, layers, device, _batches(loader, images, 1))
            return
        exchange = ProcessGroupExchange(group, device)
        batches = _batches(loader, images, exchange.world_size)
        # `build` raises on every rank if one fails, so that no rank waits for it in the average.
        passes = partial(_forward_passes, module, layers, device, batches)
        exchange.build("torchcomp.reestimate_batchnorm", {"images": images}, passes, _ADVICE)
        for name, mean in exact_mean(exchange, statistics).items():
            statistics[name].copy_(mean)


@contextmanager
def _fresh_statistics(module: nn.Module) -> Iterator[Layers]:
    """Switch to training mode without gradients, reset all statistics, and restore the rest."""
    modes = [(each, each.training) for each in module.modules()]
    layers = updated_layers(module.train())
    before = {
        name: (layer.momentum, [(each, each.clone()) for each in layer.buffers(recurse=False)])
        for name, layer in layers.items()
    }
    reached: Layers = {}
    try:
        for layer in layers.values():
            layer.reset_running_stats()
            layer.momentum = None  # a cumulative average: 1 / num_batches_tracked
        with torch.no_grad():
            yield layers
        reached = _reached(layers)
    finally:
        for name, (momentum, buffers) in before.items():
            layers[name].momentum = momentum
            for buffer, copy in buffers if name not in reached else ():
                buffer.copy_(copy)
        for each, training in modes:
            each.training = training


def _forward_passes(
    module: nn.Module, layers: Layers, device: torch.device, batches: Iterator[Tensor]
) -> tuple[None, dict[str, Any]]:
    for inputs in batches:
        module(inputs.to(device))
    reached = _reached(layers)
    statistics = statistics_of(reached)
    if not all_finite(statistics.values(), device):
        bad = [name for name, values in statistics.items() if not values.isfinite().all()]
        raise NonFiniteError(
            f"NaN or infinity in BatchNorm statistics ({listed(bad)}): check the images and the "
            "weights; all layers keep their previous statistics"
        )
    # Equal parameters show that the ranks are between rounds.
    parameters = digest_of(dict(module.named_parameters()))
    return None, {"BatchNorm layers": list(reached), "parameters": parameters}


def _reached(layers: Layers) -> Layers:
    counts = [layer.get_buffer("num_batches_tracked") for layer in layers.values()]
    seen = torch.stack([count.to(counts[0].device) for count in counts]).tolist() if counts else []
    return {name: layers[name] for name, count in zip(layers, seen, strict=True) if count}


def _batches(loader: Iterable[Any], images: int, world_size: int) -> Iterator[Tensor]:
    check_count("images", images)
    if not any(hasattr(loader, method) for method in ("__iter__", "__getitem__")):
        raise SpecError(f"loader must be an iterable of batches, not {type(loader).__name__}")
    share, seen = -(-images // world_size), 0
    for batch in loader:
        inputs = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if not isinstance(inputs, Tensor):
            found = type(inputs).__name__
            raise SpecError(f"a batch must be a tensor of images, or begin with one, not {found}")
        yield inputs
        seen += len(inputs)
        if seen >= share:
            return
    raise SpecError(
        f"the loader ended after {seen:,} images, but this rank's share is {share:,} "
        f"(images={images} over {world_size} ranks): pass a longer loader or a smaller images="
    )


def updated_layers(module: nn.Module) -> Layers:
    """Return the BatchNorm layers whose statistics a forward pass of `module` updates."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and layer.training and layer.track_running_stats
    }


def statistics_of(layers: Layers) -> dict[str, Tensor]:
    """Return the running means and variances, by name."""
    return {
        f"{name}.{kind}": layer.get_buffer(kind)
        for name, layer in layers.items()
        for kind in ("running_mean", "running_var")
    }
