"""The networks of the experiments: two residual networks of 22 layers, and a deep MLP."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from recipes.jointspar.image_sets import ImageSetSizes

_BLOCKS = 3
_WIDTHS = (16, 32, 64)
# Different sizes, so that a budget in bytes differs from a budget in layers.
_HIDDEN = (32, 64, 128, 256, 128, 64, 32, 64, 128, 256)


class ResidualNetwork(nn.Module):
    """ResNet-20 of He et al. (2016) for small images: 19 convolutions, 2 shortcuts, 1 linear."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(channels, _WIDTHS[0], 1), nn.ReLU())
        stages = []
        before = _WIDTHS[0]
        for width in _WIDTHS:
            for index in range(_BLOCKS):
                stride = 2 if index == 0 and width != before else 1
                stages.append(Block(before, width, stride))
                before = width
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.stem(images))
        scores: Tensor = self.head(features.mean((2, 3)))
        return scores


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*_convolution(inputs, outputs, stride))
        self.second = nn.Sequential(*_convolution(outputs, outputs, 1))
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.relu(self.first(x))
        summed: Tensor = nn.functional.relu(self.second(hidden) + self.shortcut(x))
        return summed


class ResidualMLP(nn.Module):
    """A stem, residual blocks of two layers, and a head. By default, layer sizes differ eightfold.

    Args:
        inputs: number of pixels.
        classes: number of classes.
        hidden: width inside each block.
        width: width between the blocks.
    """

    def __init__(
        self, inputs: int, classes: int, hidden: Sequence[int] = _HIDDEN, width: int = 64
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, wide), nn.ReLU(), nn.Linear(wide, width)
            )
            for wide in hidden
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images.flatten(1))
        for block in self.blocks:
            x = x + block(x)
        scores: Tensor = self.head(x)
        return scores


def deep_mlp(inputs: int, width: int, depth: int, outputs: int) -> nn.Module:
    """Return ``depth`` linear layers with ReLU in between."""
    sizes = [inputs, *[width] * (depth - 1)]
    layers: list[nn.Module] = []
    for size, following in pairwise(sizes):
        layers += [nn.Linear(size, following), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def small_network(kind: str, sizes: ImageSetSizes) -> nn.Module:
    """Return a network of 22 layers for a data set's images: "mlp" or "conv"."""
    if kind == "conv":
        return ResidualNetwork(sizes.channels, sizes.classes)
    return ResidualMLP(sizes.channels * sizes.size**2, sizes.classes)


def _convolution(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]
