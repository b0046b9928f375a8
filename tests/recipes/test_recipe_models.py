"""Models by name, the simple ViTs, and errors for unknown names and wrong image sizes."""

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from recipes.errors import RecipeError
from recipes.models import build_model, check_model
from recipes.simple_vit import SIZES, sin_cos_positions
from tests.support.patience import PATIENCE
from torchcomp.advisor.torchvision_compat import import_torchvision


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


def simple_vit(size: str = "ti16", classes: int = 5) -> Any:
    return build_model(f"simple_vit/{size}", channels=3, classes=classes, small_stem=False)


def vit_pytorch(size: str = "ti16", classes: int = 5) -> Any:
    return build_model(f"vit_pytorch/simple_{size}", channels=3, classes=classes, small_stem=False)


def test_simple_vit_has_the_parameters_of_the_papers_shape() -> None:
    patch, width, depth, mlp, classes = 16, 768, 12, 3072, 1000
    block = 4 * width * (width + 1) + 2 * 2 * width + mlp * (width + 1) + width * (mlp + 1)
    embedding = width * (3 * patch**2 + 1)
    by_hand = embedding + depth * block + 2 * width + classes * (width + 1)
    with torch.device("meta"):
        model = simple_vit("b16", classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == by_hand == 86_415_592


def test_simple_vit_has_the_parameters_of_timms_vit_without_token_and_positions() -> None:
    import_torchvision()
    import timm

    options = {"class_token": False, "global_pool": "avg", "pos_embed": "none"}
    with torch.device("meta"):
        other = timm.create_model("vit_base_patch16_224", **options)
        model = simple_vit("b16", 1000)
    assert shapes(model) == shapes(other)


def shapes(model: torch.nn.Module) -> Counter[tuple[int, ...]]:
    return Counter(tuple(parameter.shape) for parameter in model.parameters())


def test_simple_vit_equals_its_equations() -> None:
    """Compare with pre-norm blocks written out in float64: attention, then MLP."""
    torch.manual_seed(0)
    model = simple_vit().double().eval()
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(2, 3, 32, 48, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(images), scores_by_hand(model, images))


def scores_by_hand(model: Any, images: torch.Tensor) -> torch.Tensor:
    size = SIZES["ti16"]
    grid = model.patches(images)
    tokens = grid.flatten(2).transpose(1, 2)
    tokens = tokens + sin_cos_positions(size.width, *grid.shape[2:], like=grid)
    for block in model.blocks:
        q, k, v = block.self_attn.in_proj_weight.chunk(3)
        x = block.norm1(tokens)
        heads = [(x @ w.T).unflatten(2, (size.heads, -1)).transpose(1, 2) for w in (q, k, v)]
        weights = (heads[0] @ heads[1].mT / 8).softmax(-1)
        mixed = (weights @ heads[2]).transpose(1, 2).flatten(2)
        tokens = tokens + block.self_attn.out_proj(mixed)
        x = block.norm2(tokens)
        tokens = tokens + block.linear2(torch.nn.functional.gelu(block.linear1(x)))
    return model.head(model.norm(tokens).mean(1))


@pytest.mark.parametrize("build", [simple_vit, vit_pytorch])
def test_simple_vits_need_whole_patches(build: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="patch size 16"):
        build()(torch.zeros(1, 3, 32, 40))


# The facts of the tests below are those of vit-pytorch 1.2.8's SimpleViT.


def test_vit_pytorch_has_the_parameters_of_its_layers() -> None:
    pixels, width, mlp, classes = 3 * 16**2, 768, 3072, 1000
    # Attention has no biases. Each block has two norms, the embedding two, the head one.
    block = 4 * width**2 + mlp * (width + 1) + width * (mlp + 1) + 2 * 2 * width
    embedding = width * (pixels + 1) + 2 * pixels + 2 * width
    by_hand = embedding + 12 * block + 2 * width + classes * (width + 1)
    with torch.device("meta"):
        model = vit_pytorch("b16", classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == by_hand == 86_381_800


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


def test_vit_pytorch_starts_as_torchs_linear_layers_do() -> None:
    model = vit_pytorch()
    attention, mlp = model.blocks[0].self_attn, model.blocks[0]
    for weight, inputs in (
        (attention.in_proj_weight, 192),
        (attention.out_proj.weight, 192),
        (mlp.linear2.weight, 768),
        (mlp.linear2.bias, 768),
        (model.patches[1].weight, 768),
        (model.head.weight, 192),
    ):
        # Uniform in +-1 / sqrt(inputs).
        assert weight.abs().max().item() == pytest.approx(inputs**-0.5, rel=0.05)
    assert weight.std().item() == pytest.approx((3 * 192) ** -0.5, rel=0.1)
    assert not torch.equal(mlp.linear1.weight, model.blocks[1].linear1.weight)


def test_blocks_of_simple_vit_start_apart_and_its_classes_equal() -> None:
    model = simple_vit()
    first, second = (block.linear1.weight for block in model.blocks[:2])
    assert not torch.equal(first, second)
    for matrix in model.blocks[0].self_attn.in_proj_weight.chunk(3):
        # Xavier's uniform distribution has the deviation sqrt(2 / (inputs + outputs)).
        assert matrix.std().item() == pytest.approx((2 / (192 + 192)) ** 0.5, rel=0.02)
    assert torch.equal(model(torch.randn(2, 3, 32, 32)), torch.zeros(2, 5))


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
