"""The benchmarks' models, from the recipes, with the size of image that each takes."""

import sys
from pathlib import Path

import torch
from torch import nn

from net.data import CLASSES

_RECIPES = Path(__file__).parents[2] / "recipes"
SIZES = {"resnet18": 32, "smallcnn": 8, "mlp": 8}


def build(name: str, seed: int) -> nn.Module:
    """Build a model with the same weights for the same seed."""
    torch.manual_seed(seed)
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, CLASSES))
    sys.path.append(str(_RECIPES))
    from models import build_model

    known = {"resnet18": "torchvision/resnet18"}.get(name, name)
    model: nn.Module = build_model(known, channels=1, classes=CLASSES, small_stem=False)
    return model
