"""Models by name: a small CNN, two simple ViTs, and the models of torchvision and timm."""

from typing import Any

import torch
from torch import Tensor, nn

from recipes.dual_patchnorm_vit import DualPatchNormViT
from recipes.errors import RecipeError, nearest
from recipes.simple_vit import SIZES, SimpleViT
from torchcomp.advisor.torchvision_compat import import_torchvision

# One name of each family, for the hint of an error.
_EXAMPLES = ["smallcnn", "simple_vit/b16", "vit_pytorch/simple_b16", "torchvision/resnet18"]
_EXAMPLES += ["timm/resnet10t"]


class SmallCNN(nn.Module):
    """Three convolutions with batch normalisation, for small images (58,474 weights for digits)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(channels, 32), *_block(32, 64), nn.MaxPool2d(2), *_block(64, 64)
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of shape (N, classes)."""
        scores: Tensor = self.head(self.features(images))
        return scores


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    # Without a bias, which the normalisation would subtract again.
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def build_model(name: str, *, channels: int, classes: int, small_stem: bool) -> nn.Module:
    library, _, architecture = name.partition("/")
    if small_stem and library != "torchvision":
        raise RecipeError(f"--small-stem is only for torchvision's ResNets, found --model {name}")
    if name == "smallcnn":
        return SmallCNN(channels, classes)
    if library == "simple_vit":
        _check_known("simple_vit", architecture, list(SIZES))
        return SimpleViT(SIZES[architecture], channels, classes)
    if library == "vit_pytorch":
        sizes = {f"simple_{size}": numbers for size, numbers in SIZES.items()}
        _check_known("vit_pytorch", architecture, list(sizes))
        return DualPatchNormViT(sizes[architecture], channels, classes)
    if library == "torchvision":
        return _torchvision_model(architecture, channels, classes, small_stem)
    if library == "timm":
        return _timm_model(architecture, channels, classes)
    raise RecipeError(
        f"--model {name!r}: expected smallcnn, simple_vit/SIZE, vit_pytorch/simple_SIZE, "
        f"torchvision/NAME or timm/NAME; did you mean {nearest(name, _EXAMPLES)}?"
    )


def check_model(model: nn.Module, name: str, *, channels: int, size: int) -> None:
    """Run one blank image through ``model``, to report a wrong size before the data is opened."""
    was_training = model.training
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            # In eval mode, because BatchNorm in training needs several values per channel.
            model.eval()(torch.zeros(1, channels, size, size, device=device))
    # torchvision, timm and torch raise different errors for a wrong size.
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        shape = f"{channels} x {size} x {size}"
        raise RecipeError(f"--model {name} does not accept images of {shape}: {reason}") from None
    finally:
        model.train(was_training)


def _torchvision_model(
    architecture: str, channels: int, classes: int, small_stem: bool
) -> nn.Module:
    models = import_torchvision().models
    _check_known("torchvision", architecture, models.list_models(module=models))
    model: nn.Module = models.get_model(architecture, weights=None, num_classes=classes)
    if small_stem:
        _shrink_stem(model, architecture)
    return model if channels == 3 else nn.Sequential(_GreyToColour(), model)


def _timm_model(architecture: str, channels: int, classes: int) -> nn.Module:
    # timm imports torchvision, which needs this first (see torchvision_compat.py).
    import_torchvision()
    import timm

    _check_known("timm", architecture, timm.list_models())
    model: Any = timm.create_model(architecture, num_classes=classes, in_chans=channels)
    return model


def _check_known(library: str, architecture: str, known: list[str]) -> None:
    if architecture not in known:
        hint = nearest(architecture, known)
        raise RecipeError(f"{library} has no model {architecture!r}; did you mean {hint!r}?")


class _GreyToColour(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.expand(-1, 3, -1, -1)


def _shrink_stem(model: Any, architecture: str) -> None:
    if not isinstance(getattr(model, "maxpool", None), nn.MaxPool2d):
        raise RecipeError(f"--small-stem needs a torchvision ResNet, found {architecture}")
    # A 7x7 stem with stride 2 and pooling would leave 8 x 8 of a CIFAR image.
    width = model.conv1.out_channels
    model.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
