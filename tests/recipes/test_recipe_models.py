"""Models by name, the simple ViT of vit-pytorch, learning rates, and errors for unknown names."""

import math

import numpy as np
import pytest
import torch

from recipes.errors import RecipeError
from recipes.models import build_model, check_model
from recipes.optimizers import build_optimizer, lr_function
from recipes.settings import Settings
from recipes.simple_vit import sin_cos_positions
from tests.test_learning_rates import FINAL, by_hand
from torchcomp.specs.learning_rates import DECAYS

NAMES = ["smallcnn", "simple_vit/ti16", "vit_pytorch/simple_ti16"]
NAMES += ["torchvision/resnet18", "timm/resnet10t"]


@pytest.mark.parametrize("name", NAMES)
def test_models_take_grey_and_colour_images(name):
    for channels in (1, 3):
        model = build_model(name, channels=channels, classes=7, small_stem=False)
        assert model.eval()(torch.zeros(2, channels, 64, 64)).shape == (2, 7)


def test_small_stem_keeps_the_resolution_of_small_images():
    model = build_model("torchvision/resnet18", channels=3, classes=10, small_stem=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962
    assert model.maxpool(model.conv1(torch.zeros(1, 3, 32, 32))).shape[-1] == 32


def test_vit_pytorch_equals_its_equations():
    """Compare with those of version 1.2.8 in float64, with weights that are not the first."""
    torch.manual_seed(0)
    name = "vit_pytorch/simple_ti16"
    model = build_model(name, channels=3, classes=5, small_stem=False).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    images = torch.randn(2, 3, 32, 48, dtype=torch.float64)

    def norm(values, layer):
        centred = values - values.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / deviation * layer.weight + layer.bias

    before, linear, after = model.patches
    patches = [patch for row in images.split(16, dim=2) for patch in row.split(16, dim=3)]
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
    expected = model.head(norm(tokens.mean(1), model.norm))
    for training in (True, False):
        torch.testing.assert_close(model.train(training)(images), expected)


def test_positions_are_sines_and_cosines_of_row_and_column():
    table = sin_cos_positions(8, 2, 3, like=torch.zeros((), dtype=torch.float64))
    x, y, slow = 2, 1, 1e-4
    expected = [f(p * w) for p in (x, y) for f in (math.sin, math.cos) for w in (1, slow)]
    assert table[y * 3 + x].tolist() == pytest.approx(expected, abs=1e-6)
    assert len(table.unique(dim=0)) == 6


UNKNOWN = {
    "simple_vit/b15": "simple_vit .*'b15'.*'b16'",
    "vit_pytorch/b16": "vit_pytorch .*'b16'.*'simple_b16'",
    "torchvision/resnet19": "torchvision .*'resnet19'.*'resnet1",
    "timm/vit_tiny_patch16_22": "timm .*'vit_tiny_patch16_22'.*_224'",
    "smalcnn": "--model 'smalcnn': .*simple_vit/SIZE.* smallcnn.$",
}


@pytest.mark.parametrize("name", [*UNKNOWN, "smallcnn", "torchvision/vgg11"])
def test_unknown_models(name):
    stem = name not in UNKNOWN
    with pytest.raises(RecipeError, match=UNKNOWN.get(name, "--small-stem")):
        build_model(name, channels=3, classes=10, small_stem=stem)


def test_images_that_do_not_fit_are_refused_before_training():
    name = "timm/vit_tiny_patch16_224"
    model = build_model(name, channels=1, classes=10, small_stem=False)
    with pytest.raises(RecipeError, match=f"--model {name} .*1 x 8 x 8: Input"):
        check_model(model, name, channels=1, size=8)
    assert model.training


# Learning rates: those of every step equal the formula in float64.


@pytest.mark.parametrize("decay", [*DECAYS, "step"])
def test_the_optimizer_gets_exactly_the_learning_rate_of_every_step(decay):
    more = {"milestones": (3, 6), "gamma": 0.1} if decay == "step" else {}
    settings = Settings(epochs=9, lr=0.8, final_lr=FINAL, warmup_steps=20, schedule=decay, **more)
    lr_at = lr_function(settings, 10)
    expected = [0.8 * 0.1 ** ((step >= 30) + (step >= 60)) for step in range(91)]
    expected[:20] = [FINAL + (0.8 - FINAL) * step / 20 for step in range(20)]
    if decay != "step":
        expected = by_hand(decay, total=90, warmup=20, peak=0.8)
    np.testing.assert_allclose([lr_at(t) for t in range(91)], expected, rtol=1e-12)
    made = build_optimizer(settings, torch.nn.Linear(2, 2))
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lr_at)
    for step in range(90):
        assert made.param_groups[0]["lr"] == lr_at(step)
        made.step()
        scheduler.step()
