"""How parameters are grouped into layers."""

import torch
from torch import nn

from torchcomp.jointspar.layers import default_layers

# The model itself has a parameter. Norms come after a convolution, or open a block.
CONVOLUTIONS = """conv1.weight bn1.bias layer1.conv1.weight layer1.bn1.bias
    layer1.downsample.0.weight layer1.downsample.1.bias layer10.conv1.weight fc.weight fc.bias"""
BLOCKS = """cls_token blocks.0.norm1.bias blocks.0.attn.qkv.weight blocks.0.attn.proj.weight
    blocks.0.norm2.bias blocks.1.norm1.bias blocks.1.attn.qkv.weight blocks.1.attn.proj.weight
    norm.bias head.weight"""


def grouped(names):
    dims = {name: 1 + name.endswith(("weight", "token")) for name in names.split()}
    parameters = {name: torch.zeros((2,) * d) for name, d in dims.items()}
    layers = default_layers((name, nn.Parameter(x)) for name, x in parameters.items())
    return {layer: " ".join(members) for layer, members in layers.items()}


def test_a_norm_joins_the_convolution_before_it():
    assert grouped(CONVOLUTIONS) == {
        "conv1": "conv1.weight bn1.bias",
        "layer1.conv1": "layer1.conv1.weight layer1.bn1.bias",
        "layer1.downsample.0": "layer1.downsample.0.weight layer1.downsample.1.bias",
        "layer10.conv1": "layer10.conv1.weight",
        "fc": "fc.weight fc.bias",
    }


def test_a_norm_that_opens_a_block_joins_the_weights_of_its_block():
    assert grouped(BLOCKS) == {
        "(model)": "cls_token",
        "blocks.0.attn.qkv": "blocks.0.norm1.bias blocks.0.attn.qkv.weight",
        "blocks.0.attn.proj": "blocks.0.attn.proj.weight blocks.0.norm2.bias",
        "blocks.1.attn.qkv": "blocks.1.norm1.bias blocks.1.attn.qkv.weight",
        "blocks.1.attn.proj": "blocks.1.attn.proj.weight norm.bias",
        "head": "head.weight",
    }
