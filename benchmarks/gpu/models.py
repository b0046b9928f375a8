"""ResNet-50 and ViT-B/16 with the parameters of the published models, and a tiny one of each.

They are written out here, so that the benchmark needs no other package than torch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut; He et al. 2016, with the stride in the 3 x 3 layer."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.layers = nn.Sequential(
            *_convolution(inputs, width, 1, 1),
            nn.ReLU(),
            *_convolution(width, width, 3, stride),
            nn.ReLU(),
            *_convolution(width, outputs, 1, 1),
        )
        fits = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity() if fits else nn.Sequential(*_convolution(inputs, outputs, 1, stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layers(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, side: int, stride: int) -> tuple[nn.Module, nn.Module]:
    layer = nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False)
    return layer, nn.BatchNorm2d(outputs)


def resnet(depths: tuple[int, ...], width: int, classes: int) -> nn.Module:
    layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            stride = 2 if stage and not block else 1
            layers.append(Bottleneck(inputs, width << stage, stride))
            inputs = 4 * (width << stage)
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers, *pool)


class VisionTransformer(nn.Module):
    """Dosovitskiy et al. 2021: patches, a class token, an encoder and a linear head."""

    def __init__(self, side: int, patch: int, width: int, depth: int, heads: int, classes: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        self.encoder = nn.TransformerEncoder(block, depth, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.positions
        return self.head(self.encoder(tokens)[:, 0])


@dataclass(frozen=True)
class Task:
    """A model, and the images that it trains on."""

    build: Callable[[], nn.Module]
    side: int
    batch: int
    classes: int


TASKS = {
    "resnet50": Task(lambda: resnet((3, 4, 6, 3), 64, 1000), 224, 64, 1000),
    "vit_b_16": Task(lambda: VisionTransformer(224, 16, 768, 12, 12, 1000), 224, 64, 1000),
}
TINY = {
    "resnet50": Task(lambda: resnet((1, 1), 4, 10), 32, 2, 10),
    "vit_b_16": Task(lambda: VisionTransformer(32, 16, 16, 1, 2, 10), 32, 2, 10),
}
