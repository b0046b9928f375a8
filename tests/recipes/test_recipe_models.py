"""Models by name, and what is said of names and shapes that do not exist."""

import subprocess
import sys

import pytest
import torch
from errors import RecipeError
from models import build_model, check_model


@pytest.mark.parametrize("name", ["smallcnn", "torchvision/resnet18", "timm/resnet10t"])
def test_models_take_grey_and_colour_images(name: str) -> None:
    for channels, size in ((1, 64), (3, 64)):
        model = build_model(name, channels=channels, classes=7, small_stem=False)
        assert model.eval()(torch.zeros(2, channels, size, size)).shape == (2, 7)


def test_small_stem_keeps_the_resolution_of_small_images() -> None:
    model = build_model("torchvision/resnet18", channels=3, classes=10, small_stem=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962
    assert model.maxpool(model.conv1(torch.zeros(1, 3, 32, 32))).shape[-1] == 32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torchvision/resnet19", "torchvision has no model 'resnet19'; the nearest is 'resnet1"),
        ("timm/vit_tiny_patch16_22", "timm has no model .*; the nearest is 'vit_tiny_patch16_224'"),
        ("smalcnn", "expected smallcnn, torchvision/NAME or timm/NAME, such as smallcnn"),
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
    with pytest.raises(RecipeError, match=f"--model {name} cannot take images of 1 x 8 x 8: Input"):
        check_model(model, name, channels=1, size=8)
    assert model.training


def test_torchvision_comes_without_its_operators_when_it_must() -> None:
    code = (
        "from torchvision_compat import import_torchvision\n"
        "first = import_torchvision()\n"
        "assert import_torchvision() is first\n"
        "first.models.get_model('resnet18', weights=None)\n"
    )
    folder = build_model.__code__.co_filename.rpartition("/")[0]
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=60)
