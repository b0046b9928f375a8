"""reestimate_batchnorm: BatchNorm statistics of averaged weights."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from torchcomp.averager import exact_mean
from torchcomp.checkpoint import digest_of, listed
from torchcomp.checks import check_count
from torchcomp.ddp.checks import check_is_module
from torchcomp.errors import NonFiniteError, SpecError
from torchcomp.exchange import ProcessGroupExchange

_log = logging.getLogger(__name__)

Layers = dict[str, _BatchNorm]


def reestimate_batchnorm(model: nn.Module, loader: Iterable[Any], images: int = 4096) -> None:
    """Estimate the running mean and variance of every BatchNorm anew, before an evaluation.

    Local steps average parameters but not BatchNorm's buffers, which then belong to weights that no
    longer exist. As in Gu et al., ICLR 2024 (arXiv 2310.14423), every rank

    1. runs `model` in training mode, without gradients, on batches of its own shard of the
       training set, augmented as in training;
    2. takes the mean of the batches' statistics (momentum 1/(1+i) at batch i = 0, 1, ..., so the
       first batch replaces what was there);
    3. averages running mean and variance over the ranks, in float32 or wider.

    Without torch.distributed, step 3 is left out. With it, all ranks call this together, between
    rounds (``sync.next_sync is None``), and end with the same statistics. Modes and momenta are
    restored; ``num_batches_tracked`` is the number of batches of this estimate. Layers that
    ``model.train()`` leaves in evaluation mode (frozen ones), layers that no batch reaches, and all
    layers after an error keep their statistics. Dropout and the loader draw from the global
    generators. A model without running statistics is left alone, which is logged once.

    Args:
        model: the module, or the DDP model around it, whose process group then replaces the
            default one. Call this under the same autocast as training.
        loader: yields tensors of images (n, ...), or tuples or lists that begin with one, on any
            device. Each rank gives its own shard.
        images: how many images to take, of all ranks together. Each rank takes whole batches until
            it has seen ``ceil(images / ranks)`` images; a smaller last batch counts as much as the
            others.

    Raises:
        SpecError: if an argument or a batch is of the wrong type, or the loader ends before this
            rank's share.
        NonFiniteError: if statistics are not finite.
        UnsupportedModelError: if `model` is not a module.
        RankMismatchError: on all ranks, if their parameters or layers differ, or some of them fail.
    """
    check_is_module(model)
    module, group = model, None
    inner = getattr(model, "_orig_mod", model)  # of a compiled DDP model
    if isinstance(inner, DistributedDataParallel):
        # Its own forward would wait for ranks without a batch.
        module, group = inner.module, inner.process_group
    with _anew(module) as layers:
        if not layers:
            _say_that_there_is_nothing_to_do()
        elif not dist.is_initialized():
            _passes(module, layers, _share(loader, images, 1))
        else:
            statistics = _statistics(layers)
            exchange = ProcessGroupExchange(group, next(iter(statistics.values())).device)
            passes = partial(_passes, module, layers, _share(loader, images, exchange.world_size))
            exchange.build("torchcomp.reestimate_batchnorm", {"images": images}, passes, _ADVICE)
            for name, mean in exact_mean(exchange, statistics).items():
                statistics[name].copy_(mean)


@cache
def _say_that_there_is_nothing_to_do() -> None:
    _log.warning(
        "reestimate_batchnorm: the model has no BatchNorm layer with running statistics, so there "
        "is nothing to do (this is said once)"
    )


@contextmanager
def _anew(module: nn.Module) -> Iterator[Layers]:
    """Training mode without gradients, with empty statistics that average cumulatively.

    At the end, restore modes, momenta, and the statistics of layers that no batch reached; after an
    error, all statistics.
    """
    modes = [(each, each.training) for each in module.modules()]
    module.train()
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and layer.training and layer.track_running_stats
    }
    before = [
        (layer, layer.momentum, [(each, each.clone()) for each in layer.buffers(recurse=False)])
        for layer in layers.values()
    ]
    done = False
    try:
        for layer in layers.values():
            layer.reset_running_stats()
            layer.momentum = None
        with torch.no_grad():
            yield layers
        done = True
    finally:
        for layer, momentum, buffers in before:
            layer.momentum = momentum
            if not done or not layer.num_batches_tracked:
                for buffer, copy in buffers:
                    buffer.copy_(copy)
        for each, training in modes:
            each.training = training


_ADVICE = (
    "Nothing was changed. All ranks need the averaged weights and enough images: call it between "
    "rounds (LocalSGD's next_sync is None), with each rank's own shard of the training set."
)


def _passes(
    module: nn.Module, layers: Layers, batches: Iterator[Tensor]
) -> tuple[None, dict[str, Any]]:
    """This rank's forward passes, and the facts that all ranks must share."""
    device = next(iter(_statistics(layers).values())).device
    for inputs in batches:
        module(inputs.to(device))
    reached = {name: layer for name, layer in layers.items() if layer.num_batches_tracked}
    bad = [
        name
        for name, layer in reached.items()
        if not all(values.isfinite().all() for values in _statistics({name: layer}).values())
    ]
    if bad:
        raise NonFiniteError(
            f"NaN or infinity in the statistics of {len(bad)} BatchNorm layers ({listed(bad)}): "
            "look at the images and the weights; the layers keep the statistics that they had"
        )
    return None, {
        "BatchNorm layers": list(reached),
        "parameters": digest_of(dict(module.named_parameters())),
    }


def _share(loader: Iterable[Any], images: int, world_size: int) -> Iterator[Tensor]:
    """The first batches of a rank's shard, with ``ceil(images / world_size)`` images at least."""
    check_count("images", images)
    # A data set without __iter__ can be iterated over, too.
    if not any(hasattr(loader, way) for way in ("__iter__", "__getitem__")):
        raise SpecError(f"loader must be an iterable of batches, not {type(loader).__name__}")
    share, seen = -(-images // world_size), 0
    for batch in loader:
        inputs = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if not isinstance(inputs, Tensor):
            raise SpecError(
                "a batch is a tensor of images, or a tuple or list that begins with one, not "
                f"{type(inputs).__name__}"
            )
        yield inputs
        seen += len(inputs)
        if seen >= share:
            return
    raise SpecError(
        f"the loader ended after {seen:,} images, and this rank's share is {share:,} "
        f"(images={images} over {world_size} ranks): give a longer loader, or a smaller images="
    )


def _statistics(layers: Layers) -> dict[str, Tensor]:
    return {
        f"{name}.{kind}": layer.get_buffer(kind)
        for name, layer in layers.items()
        for kind in ("running_mean", "running_var")
    }
