"""Models by name: a small CNN, the simple ViT, and the models of torchvision and timm."""

from typing import Any

import torch
from torch import Tensor, nn

from recipes.errors import RecipeError, nearest
from recipes.simple_vit import SIZES, SimpleViT
from recipes.torchvision_compat import import_torchvision


class SmallCNN(nn.Module):
    """Three convolutions with batch normalisation, for images of a few pixels; 66,000 weights."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(channels, 32), *_block(32, 64), nn.MaxPool2d(2), *_block(64, 64)
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Return a score for each class."""
        scores: Tensor = self.head(self.features(images))
        return scores


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def build_model(name: str, *, channels: int, classes: int, small_stem: bool) -> nn.Module:
    """Build the model called ``name`` with fresh weights."""
    library, _, kind = name.partition("/")
    if small_stem and library != "torchvision":
        raise RecipeError(f"--small-stem changes torchvision's ResNets, not --model {name}")
    if name == "smallcnn":
        return SmallCNN(channels, classes)
    if library == "simple_vit":
        _check_known("simple_vit", kind, list(SIZES))
        return SimpleViT(SIZES[kind], channels, classes)
    if library == "torchvision":
        return _torchvision_model(kind, channels, classes, small_stem)
    if library == "timm":
        return _timm_model(kind, channels, classes)
    hint = nearest(name, ["smallcnn", "simple_vit/b16", "torchvision/resnet18", "timm/resnet10t"])
    raise RecipeError(
        f"--model {name!r}: expected smallcnn, simple_vit/SIZE, torchvision/NAME or timm/NAME, "
        f"such as {hint}"
    )


def check_model(model: nn.Module, name: str, *, channels: int, size: int) -> None:
    """Send one image through ``model``, so that one that does not fit is refused at once."""
    was_training = model.training
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, channels, size, size, device=device))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        shape = f"{channels} x {size} x {size}"
        raise RecipeError(f"--model {name} cannot take images of {shape}: {reason}") from None
    finally:
        model.train(was_training)


def _torchvision_model(kind: str, channels: int, classes: int, small_stem: bool) -> nn.Module:
    models = import_torchvision().models
    _check_known("torchvision", kind, models.list_models(module=models))
    model: nn.Module = models.get_model(kind, weights=None, num_classes=classes)
    if small_stem:
        _shrink_stem(model, kind)
    return model if channels == 3 else nn.Sequential(_Grey(), model)


def _timm_model(kind: str, channels: int, classes: int) -> nn.Module:
    import_torchvision()
    import timm

    _check_known("timm", kind, timm.list_models())
    model: Any = timm.create_model(kind, num_classes=classes, in_chans=channels)
    return model


def _check_known(library: str, kind: str, known: list[str]) -> None:
    if kind not in known:
        raise RecipeError(
            f"{library} has no model {kind!r}; the nearest is {nearest(kind, known)!r}"
        )


class _Grey(nn.Module):
    """Repeats a grey image three times for models that know colour only."""

    def forward(self, images: Tensor) -> Tensor:
        return images.expand(-1, 3, -1, -1)


def _shrink_stem(model: Any, kind: str) -> None:
    if not isinstance(getattr(model, "maxpool", None), nn.MaxPool2d):
        raise RecipeError(f"--small-stem needs a torchvision ResNet, not {kind}")
    width = model.conv1.out_channels
    model.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
