"""The digits, drawn anew for every seed, and the models: several seeds side by side as one module.

A step of a small model costs little but the calls. Side by side, one call computes all seeds and
all ranks. They stay independent: the loss is the sum of theirs, and optimizers and averages treat
every element on its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from recipes.image_data.augment import normalise
from recipes.image_data.in_memory import Split
from recipes.image_data.order import NOISE, SPLIT, keyed_seed
from recipes.image_data.presets import PRESETS
from recipes.image_data.sources import read_public
from recipes.simple_vit import SimpleViT, Size

_Model = TypeVar("_Model", bound=nn.Module)
PRESET = PRESETS["digits"]
SAMPLES = 360
"""Training images, of 898 or 899. The others are evaluated on: an image is 0.19 points."""
_HIDDEN = 128
# Four patches of 4 x 4 pixels.
_VIT = Size(patch=4, width=64, depth=1, heads=4, mlp=128)


def draw(seed: int, part: str, label_noise: float) -> tuple[Split, Split]:
    """Return a seed's training images, with its wrong labels, and images to evaluate on.

    Both depend on the seed, so that differences over the seeds include those of the data.
    """
    half = _halves()[part]
    random = torch.Generator().manual_seed(keyed_seed(SPLIT, seed))
    order = torch.randperm(len(half.labels), generator=random)
    train = half.take(order[:SAMPLES])
    random = torch.Generator().manual_seed(keyed_seed(NOISE, seed))
    drawn = torch.rand(SAMPLES, generator=random) < label_noise
    # All classes, so that a tenth of the replaced labels are right again.
    others = torch.randint(PRESET.classes, (SAMPLES,), generator=random)
    noisy = replace(train, labels=torch.where(drawn, others, train.labels))
    return noisy, half.take(order[SAMPLES:])


@cache
def _halves() -> dict[str, Split]:
    splits = read_public("digits", None).values()
    images = torch.cat([torch.from_numpy(split.images) for split in splits])
    whole = Split(images, torch.cat([torch.from_numpy(split.labels) for split in splits]))
    # Tuning and reporting share no image. Each half is split again by every seed.
    even = torch.arange(len(whole.labels)) % 2 == 0
    return {"validation": whole.take(even), "test": whole.take(~even)}


def inputs(images: Tensor) -> Tensor:
    return normalise(images, PRESET)


def build(model: str, seeds: Sequence[int]) -> nn.Module:
    """Return a model, "mlp" or "vit", for each seed, side by side, with fresh weights."""
    if model == "mlp":
        return _stacked([_fresh(seed, _mlp) for seed in seeds])
    shape = (_VIT, PRESET.channels, PRESET.classes)
    return EachInTurn([_fresh(seed, SimpleViT, *shape) for seed in seeds])


def _fresh(seed: int, make: Callable[..., _Model], *shape: Any) -> _Model:
    # The caller's random state stays as it is.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(*shape)


def _mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(PRESET.channels * PRESET.size**2, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, PRESET.classes),
    )


class EachInTurn(nn.Module):
    """S models of any kind, called one after another: inputs (N, S, ...) to (N, S, classes)."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, inputs: Tensor) -> Tensor:
        each = zip(self.models, inputs.unbind(1), strict=True)
        return torch.stack([model(own) for model, own in each], dim=1)


class LinearStack(nn.Module):
    """S linear layers of the same shape as one batched product: (N, S, in) to (N, S, out)."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        weights = [layer.weight.detach().T for layer in layers]
        self.weight = nn.Parameter(torch.stack(weights).contiguous())
        self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers])[:, None])

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, inputs.transpose(0, 1), self.weight).transpose(0, 1)


def _stacked(models: Sequence[nn.Sequential]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten(2)]
    for same in zip(*models, strict=True):
        layers.append(LinearStack(same) if isinstance(same[0], nn.Linear) else nn.ReLU())
    return nn.Sequential(*layers)


@torch.no_grad()
def average_over_ranks(model: nn.Module, ranks: int, *, gradients: bool = False) -> None:
    """Average parameters or gradients of ranks * S models: those of the first rank come first."""
    # The tensors of a model are the first dimension of a stack, or parameters of their own.
    models = model.models if isinstance(model, EachInTurn) else [model]
    for same in zip(*(each.parameters() for each in models), strict=True):
        tensors = [tensor.grad if gradients else tensor.detach() for tensor in same]
        whole = tensors[0] if len(tensors) == 1 else torch.stack(tensors)
        by_rank = whole.unflatten(0, (ranks, -1))
        by_rank.copy_(by_rank.sum(0) / ranks)
        if len(tensors) > 1:
            for tensor, own in zip(tensors, whole, strict=True):
                tensor.copy_(own)


def first_models(model: nn.Module, count: int) -> nn.Module:
    """Return the first models of some that are side by side. A stack loses the others."""
    if isinstance(model, EachInTurn):
        return EachInTurn([*model.models[:count]])
    for parameter in model.parameters():
        parameter.data = parameter.data[:count]
    return model
