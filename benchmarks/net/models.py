"""The models of the benchmarks, built by the recipes, and the image size of each."""

from itertools import chain, pairwise

import torch
from torch import nn

from benchmarks.net.data import CLASSES

# Pixels per side of the input images.
SIZES = {"resnet18": 32, "smallcnn": 8, "mlp": 8, "deep-mlp": 8}


def build(name: str, seed: int) -> nn.Module:
    """Build a model. The same seed gives the same weights."""
    # Ranks do not broadcast their weights, so all of them must build the same ones.
    torch.manual_seed(seed)
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, CLASSES))
    if name == "deep-mlp":
        widths = [64, 1024, 1024, 1024]
        layers = [(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths)]
        return nn.Sequential(nn.Flatten(), *chain(*layers), nn.Linear(1024, CLASSES))
    from recipes.models import build_model

    known = {"resnet18": "torchvision/resnet18"}.get(name, name)
    model: nn.Module = build_model(known, channels=1, classes=CLASSES, small_stem=False)
    return model
