"""How parameters are grouped into layers."""

import torch
from torch import nn

from torchcomp.jointspar.layers import default_layers, layers_by_pattern


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = nn.ModuleList([Basic(), Basic()])
        self.fc = nn.Linear(4, 2)


class Basic(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))


class Transformer(nn.Module):
    """Norms come before the weights of their block, and the model itself has a parameter."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(8)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(8, 24), "proj": nn.Linear(8, 8)})
        self.norm2 = nn.LayerNorm(8)


def names(module):
    return [name for name, _ in module.named_parameters()]


def test_a_norm_joins_the_convolution_before_it():
    layers = default_layers(Residual().named_parameters())
    assert layers["conv1"] == ("conv1.weight", "bn1.weight", "bn1.bias")
    downsample = "layer1.1.downsample."
    assert layers[f"{downsample}0"] == tuple(
        f"{downsample}{name}" for name in ("0.weight", "1.weight", "1.bias")
    )
    assert layers["fc"] == ("fc.weight", "fc.bias")
    assert len(layers) == 6


def test_a_norm_that_opens_a_block_joins_the_weights_of_its_block():
    layers = default_layers(Transformer().named_parameters())
    assert layers["(model)"] == ("cls_token",)
    for block in ("blocks.0", "blocks.1"):
        assert f"{block}.norm1.weight" in layers[f"{block}.attn.qkv"]
        assert f"{block}.norm2.weight" in layers[f"{block}.attn.proj"]
    assert "norm.weight" in layers["blocks.1.attn.proj"]
    assert len(layers) == 6


def test_a_parameter_belongs_to_the_first_pattern_that_matches():
    layers = layers_by_pattern(
        {"stem": ["conv1.*", "bn1.*"], "head": "fc.*", "body": "*"}, names(Residual())
    )
    assert list(layers) == ["stem", "head", "body"]
    assert layers["stem"] == ("conv1.weight", "bn1.weight", "bn1.bias")
    assert len(layers["body"]) == 12
    assert all(name.startswith("layer1.") for name in layers["body"])
