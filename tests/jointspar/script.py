"""Steps of the tests of JointSpar, and their expected gradients."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import local_gradients, loss_of
from torchcomp.jointspar import JointSpar

Gradients = dict[str, Tensor | None]


def keep(jointspar: JointSpar, *layers: str, p: float | dict[str, float] = 0.5) -> None:
    """Make the next step keep these layers on this rank, as if drawn with p."""
    names = list(jointspar.layers)
    each = p if isinstance(p, dict) else dict.fromkeys(names, p)
    sampler = jointspar._sampler
    sampler.kept = np.array([name in layers for name in names])
    sampler.p = np.array([each[name] for name in names])
    sampler.reset()
    jointspar._skip_dropped()


def backward(model: nn.Module, *batches: Any) -> None:
    """Compute the gradients of one step. All batches but the last are accumulated by no_sync."""
    for batch in batches[:-1]:
        with model.no_sync():
            loss_of(model(*batch)).backward()
    loss_of(model(*batches[-1])).backward()


def estimates(jointspar: JointSpar, model: DistributedDataParallel, *batches: Any) -> Gradients:
    """Return this rank's g_hat = Z g / p, computed on a copy of the module without JointSpar."""
    kept, p = jointspar.kept, dict(zip(jointspar.layers, jointspar._sampler.p, strict=True))
    total: dict[str, Tensor] = {}
    for batch in batches:
        for name, gradient in local_gradients(model, batch).items():
            total[name] = total[name] + gradient if name in total else gradient
    named = [(name, layer) for layer, names in jointspar.layers.items() for name in names]
    return {n: total[n] / float(p[layer]) if layer in kept else None for n, layer in named}


def mean_of(all_ranks: list[Gradients], name: str) -> Tensor | None:
    """Return the mean of a gradient over the ranks, or None if no rank kept its layer."""
    gradients = [found[name] for found in all_ranks]
    some = next((g for g in gradients if g is not None), None)
    if some is None:
        return None
    return torch.stack([torch.zeros_like(some) if g is None else g for g in gradients]).mean(0)


def seen(model: DistributedDataParallel) -> Gradients:
    """Return a copy of the gradients that the optimizer finds, in float64."""
    return {
        name: None if parameter.grad is None else parameter.grad.double().clone()
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad
    }


def assert_mean(found: list[Gradients], own: list[Gradients], tolerance: float = 1e-12) -> None:
    """Check that every rank's gradients are the mean of all ranks' estimates, or None."""
    for name in own[0]:
        expected = mean_of(own, name)
        for gradients in found:
            got = gradients[name]
            if expected is None or got is None:
                # DDP leaves parameters that no rank used without a gradient.
                assert got is None, name
                assert expected is None or not expected.any(), name
                continue
            scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
            torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * scale)
