"""Models by name, the simple ViTs, and errors for unknown names and wrong image sizes."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from recipes.errors import RecipeError
from recipes.models import build_model, check_model
from recipes.simple_vit import sin_cos_positions
from tests.support.patience import PATIENCE


@pytest.mark.parametrize(
    "name",
    [
        "smallcnn",
        "simple_vit/ti16",
        "vit_pytorch/simple_ti16",
        "torchvision/resnet18",
        "timm/resnet10t",
    ],
)
def test_models_take_grey_and_colour_images(name: str) -> None:
    for channels, size in ((1, 64), (3, 64)):
        model = build_model(name, channels=channels, classes=7, small_stem=False)
        assert model.eval()(torch.zeros(2, channels, size, size)).shape == (2, 7)


def test_small_stem_keeps_the_resolution_of_small_images() -> None:
    model = build_model("torchvision/resnet18", channels=3, classes=10, small_stem=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962
    assert model.maxpool(model.conv1(torch.zeros(1, 3, 32, 32))).shape[-1] == 32


def vit_pytorch(size: str = "ti16", classes: int = 5) -> Any:
    return build_model(f"vit_pytorch/simple_{size}", channels=3, classes=classes, small_stem=False)


# The facts of the tests below are those of vit-pytorch 1.2.8's SimpleViT.


@pytest.mark.parametrize("training", [True, False])
def test_vit_pytorch_equals_its_equations(training: bool) -> None:
    """Compare with the equations written out in float64, with weights that are not the first."""
    torch.manual_seed(0)
    model = vit_pytorch().double().train(training)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    images = torch.randn(2, 3, 32, 48, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(images), vit_pytorch_by_hand(model, images))


def vit_pytorch_by_hand(model: Any, images: torch.Tensor) -> torch.Tensor:
    before, linear, after = model.patches
    rows = images.split(16, dim=2)
    patches = [patch for row in rows for patch in row.split(16, dim=3)]
    # Row, column, channel.
    pixels = torch.stack([patch.permute(0, 2, 3, 1).flatten(1) for patch in patches], dim=1)
    tokens = norm(linear(norm(pixels, before)), after)
    tokens = tokens + sin_cos_positions(192, 2, 3, like=tokens)
    for block in model.blocks:
        x = norm(tokens, block.norm1)
        q, k, v = (x @ block.self_attn.in_proj_weight.T).unflatten(2, (3, 3, 64)).unbind(2)
        scores = torch.einsum("nqhd,nkhd->nhqk", q, k) / 8
        mixed = torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1), v).flatten(2)
        tokens = tokens + mixed @ block.self_attn.out_proj.weight.T
        x = norm(tokens, block.norm2)
        tokens = tokens + block.linear2(torch.nn.functional.gelu(block.linear1(x)))
    return model.head(norm(tokens.mean(1), model.norm))


def norm(values: torch.Tensor, layer: torch.nn.LayerNorm) -> torch.Tensor:
    centred = values - values.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return centred / deviation * layer.weight + layer.bias


def test_positions_are_sines_and_cosines_of_row_and_column() -> None:
    table = sin_cos_positions(8, 2, 3, like=torch.zeros((), dtype=torch.float64))
    x, y, slow = 2, 1, 1e-4
    expected = [f(p * w) for p in (x, y) for f in (math.sin, math.cos) for w in (1, slow)]
    assert table[y * 3 + x].tolist() == pytest.approx(expected, abs=1e-6)
    assert len(table.unique(dim=0)) == 6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("simple_vit/b15", "simple_vit .*'b15'.*'b16'"),
        ("vit_pytorch/b16", "vit_pytorch .*'b16'.*'simple_b16'"),
        ("torchvision/resnet19", "torchvision .*'resnet19'.*'resnet1"),
        ("timm/vit_tiny_patch16_22", "timm .*'vit_tiny_patch16_22'.*'vit_tiny_patch16_224'"),
        ("smalcnn", "--model 'smalcnn': .*simple_vit/SIZE.* smallcnn.$"),
    ],
)
def test_unknown_models(name: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        build_model(name, channels=3, classes=10, small_stem=False)


@pytest.mark.parametrize("name", ["smallcnn", "torchvision/vgg11"])
def test_small_stem_belongs_to_resnets(name: str) -> None:
    with pytest.raises(RecipeError, match="--small-stem"):
        build_model(name, channels=3, classes=10, small_stem=True)


def test_images_that_do_not_fit_are_refused_before_training() -> None:
    name = "timm/vit_tiny_patch16_224"
    model = build_model(name, channels=1, classes=10, small_stem=False)
    with pytest.raises(RecipeError, match=f"--model {name} .*1 x 8 x 8: Input"):
        check_model(model, name, channels=1, size=8)
    assert model.training


def test_torchvision_imports_without_its_compiled_operators() -> None:
    code = (
        "from torchcomp.advisor.torchvision_compat import import_torchvision\n"
        "first = import_torchvision()\n"
        "assert import_torchvision() is first\n"
        "first.models.get_model('resnet18', weights=None)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
