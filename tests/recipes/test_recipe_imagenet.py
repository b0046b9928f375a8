"""The ImageNet configurations: the paper's settings, synchronisations, and shrunken copies."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.errors import RecipeError
from recipes.optimizers import build_optimizer
from recipes.settings import Settings, read_settings
from tests.recipes.conftest import TorchRun
from tests.recipes.forked_ranks import RECIPES
from tests.support.cases import some, thorough

# The paper's runs: steps, schedule, and the number of synchronisations, which follows from steps,
# warm-up, learning rates and the rule.
PUBLISHED = {
    "resnet152_4096_parallel": (62_400, "none", 62_400),
    "resnet152_4096_every2": (62_400, "every(2)", 31_200),
    "resnet152_4096_qsr2": (62_400, "qsr(alpha=0.2, h_base=2)", 24_792),
    "resnet152_4096_every4": (62_400, "every(4)", 15_600),
    "resnet152_4096_qsr4": (62_400, "qsr(alpha=0.25, h_base=4)", 12_539),
    "resnet152_16384_parallel": (15_600, "none", 15_600),
    "resnet152_16384_every2": (15_600, "every(2)", 7_800),
    # Not in the paper: alpha, which we scale like the learning rate.
    "resnet152_16384_qsr2": (15_600, "qsr(alpha=0.4, h_base=2)", 6_201),
    "vit_b16_4096_parallel": (93_600, "none", 93_600),
    "vit_b16_4096_every4": (93_600, "every(4)", 23_400),
    "vit_b16_4096_qsr4": (93_600, "qsr(alpha=0.0175, h_base=4)", 9_711),
    "vit_b16_4096_every8": (93_600, "every(8)", 11_700),
    "vit_b16_4096_qsr8": (93_600, "qsr(alpha=0.0175, h_base=8)", 6_461),
    "vit_b16_16384_parallel": (23_400, "none", 23_400),
    "vit_b16_16384_every4": (23_400, "every(4)", 5_850),
    # Not in the paper: alpha and h_base, which are those of batch 4096.
    "vit_b16_16384_qsr4": (23_400, "qsr(alpha=0.0175, h_base=4)", 3_771),
}
WEIGHTS = {"resnet152": 60_192_808, "vit_b16": 86_415_592}
# BatchNorm's running means and variances, which a synchronisation averages as well.
STATISTICS = {"resnet152": 151_424, "vit_b16": 0}
IMAGENET = RECIPES / "configs" / "imagenet"


# The paper's settings: of all runs, of each model, and peak lr and warm-up of each batch size.
EVERYWHERE = {"dataset": "imagenet", "crop_ratio": 224 / 256, "schedule": "cosine", "amp": "fp16"}
EVERYWHERE |= {"final_lr": 1e-6}
MODELS: dict[str, dict[str, Any]] = {
    "resnet152": {
        **{"model": "torchvision/resnet152", "epochs": 200, "accumulate": 8},
        **{"optimizer": "sgd", "momentum": 0.9, "nesterov": False, "weight_decay": 1e-4},
        **{"label_smoothing": 0.1, "randaugment_ops": 0, "mixup": 0.0, "clip_norm": 0.0},
    },
    "vit_b16": {
        **{"model": "simple_vit/b16", "epochs": 300, "accumulate": 2},
        **{"optimizer": "adamw", "beta1": 0.9, "beta2": 0.999, "label_smoothing": 0.0},
        **{"randaugment_ops": 2, "randaugment_magnitude": 10, "mixup": 0.2},
    },
}
LR_AND_WARMUP = {
    ("resnet152", 4096): (0.8, 1_560),
    # Not in the paper: the learning rate, twice that of batch 4096.
    ("resnet152", 16384): (1.6, 390),
    ("vit_b16", 4096): (0.008, 10_000),
    ("vit_b16", 16384): (0.016, 2_500),
}


def test_configurations_have_the_papers_settings() -> None:
    for name, (_, sync, _) in PUBLISHED.items():
        model, batch, method = parts_of(name)
        lr, warmup = LR_AND_WARMUP[model, batch]
        expected = {**EVERYWHERE, **MODELS[model], "lr": lr, "warmup_steps": warmup}
        expected |= {"batch_size": batch, "plan_ranks": batch // 256, "sync": sync}
        if model == "vit_b16":
            parallel = method == "parallel"
            expected["weight_decay"] = 0.1 if parallel else 0.05
            expected["clip_norm"] = 1.0 if parallel else 0.0
        settings = configured(name)
        assert {key: getattr(settings, key) for key in expected} == expected, name
        made = build_optimizer(settings, torch.nn.Linear(2, 2))
        assert made.defaults.get("eps", 1e-8) == 1e-8
        assert made.param_groups[0]["weight_decay"] == settings.weight_decay
        assert len(made.param_groups) == 1


def parts_of(name: str) -> tuple[str, int, str]:
    model, batch, method = name.rsplit("_", 2)
    return model, int(batch), method


def configured(name: str) -> Settings:
    return read_settings(["--config", str(IMAGENET / f"{name}.yaml"), "--dry-run"])


def test_every_configuration_and_the_readme_have_the_synchronisations() -> None:
    assert {path.stem for path in IMAGENET.glob("*.yaml")} == PUBLISHED.keys()
    rows = (RECIPES / "README.md").read_text().splitlines()
    for name, (steps, _, syncs) in PUBLISHED.items():
        text = (IMAGENET / f"{name}.yaml").read_text()
        assert f"\n# {syncs:,} synchronisations in {steps:,} steps (" in text
        assert "\n# Table: ImageNet" in text
        assert "\n# Expected: " in text
        (row,) = (row for row in rows if f"| [`{name}`](configs/imagenet/{name}.yaml) |" in row)
        assert f"| {syncs:,}" in row


@pytest.mark.parametrize("name", some(PUBLISHED, of=4))
def test_published_configurations_dry_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from recipes import train

    settings = configured(name)
    train.print_plan(settings)
    steps, _, syncs = PUBLISHED[name]
    weights = WEIGHTS[parts_of(name)[0]]
    ranks = settings.batch_size // 256
    # A ring all-reduce of float32 numbers, as the mean over the ranks.
    local = "parallel" not in name
    averaged = (weights, STATISTICS[parts_of(name)[0]] if local else 0)
    nbytes = syncs * sum(2 * (ranks - 1) * 4 * numbers // ranks for numbers in averaged)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{weights:,} parameters" in shown
    assert f"ranks {ranks}, 256 images each per step steps {steps:,} " in shown
    assert f"synchronisations {syncs:,} bytes in all {nbytes:,} sent by each rank" in shown


@pytest.mark.parametrize(
    "config",
    some(sorted((RECIPES / "configs").rglob("*.yaml")), of=16),
    ids=lambda p: p.stem,
)
def test_a_shrunken_copy_of_every_configuration_takes_a_step(
    config: Path, shrink_here: Callable[..., str]
) -> None:
    printed = shrink_here("--config", str(config), "--threads", "1", "--loader", "torchvision")
    assert "1 ranks, 1 steps" in printed
    assert re.search(r"epoch +1/1: loss \d+\.\d+, test \d+\.\d%", printed)


@pytest.mark.parametrize(
    "flags",
    [
        ["--sync", "post_local(switch=1, h=2)"],
        *thorough([["--sync", "swap(switch=9)"], ["--schedule", "step", "--milestones", "5"]]),
    ],
    ids=lambda flags: flags[1],
)
def test_a_shrunken_copy_of_a_two_phase_schedule_takes_two_steps(
    flags: list[str], shrink_here: Callable[..., str]
) -> None:
    assert "1 ranks, 2 steps" in shrink_here(*flags, "--threads", "1")


@pytest.mark.thorough
def test_shrunken_copies_on_two_ranks_exchange_weights(torchrun: TorchRun) -> None:
    config = str(IMAGENET / "vit_b16_4096_qsr4.yaml")
    printed = torchrun.finish(torchrun.start("--config", config, "--dry-run", "--shrink"))
    assert printed.count("synchronisations  9,711\n") == 1
    assert "simple_vit/ti16 on folder: 2 ranks, 1 steps" in printed
    assert "MB sent" in printed
    assert " 0 MB sent" not in printed


@pytest.mark.parametrize("config", ["", str(IMAGENET / "vit_b16_4096_qsr4.yaml")], ids=["", "vit"])
def test_a_dry_run_sends_an_image_through_the_model(config: str) -> None:
    from recipes import train

    flags = ["--config", config, "--image-size", "40"] if config else ["--model", "simple_vit/b16"]
    with pytest.raises(RecipeError, match=r"--model simple_vit/b16 .*patch size 16"):
        train.print_plan(read_settings([*flags, "--dry-run"]))
