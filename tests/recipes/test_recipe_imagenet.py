"""The ImageNet configurations: the paper's settings, synchronisations, and shrunken copies."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchcomp
from recipes.errors import RecipeError
from recipes.lr_schedules import lr_function
from recipes.optimizers import build_optimizer
from recipes.settings import Settings, read_settings
from tests.recipes.conftest import TorchRun
from tests.recipes.forked_ranks import RECIPES
from tests.support.cases import only, thorough
from torchcomp.spec import parse_schedule

# The paper's runs: steps, schedule, and the number of synchronisations, which follows from steps,
# warm-up, learning rates and the rule. "Ours" in a header marks values that are not the paper's.
PUBLISHED = {
    "resnet152_4096_parallel": (62_400, "none", 62_400),
    "resnet152_4096_every2": (62_400, "every(2)", 31_200),
    "resnet152_4096_qsr2": (62_400, "qsr(alpha=0.2, h_base=2)", 24_792),
    "resnet152_4096_every4": (62_400, "every(4)", 15_600),
    "resnet152_4096_qsr4": (62_400, "qsr(alpha=0.25, h_base=4)", 12_539),
    "resnet152_16384_parallel": (15_600, "none", 15_600),
    "resnet152_16384_every2": (15_600, "every(2)", 7_800),
    "resnet152_16384_qsr2": (15_600, "qsr(alpha=0.4, h_base=2)", 6_201),
    "resnet152_16384_every4": (15_600, "every(4)", 3_900),
    "resnet152_16384_qsr4": (15_600, "qsr(alpha=0.5, h_base=4)", 3_138),
    "vit_b16_4096_parallel": (93_600, "none", 93_600),
    "vit_b16_4096_every4": (93_600, "every(4)", 23_400),
    "vit_b16_4096_qsr4": (93_600, "qsr(alpha=0.0175, h_base=4)", 9_711),
    "vit_b16_4096_every8": (93_600, "every(8)", 11_700),
    "vit_b16_4096_qsr8": (93_600, "qsr(alpha=0.0175, h_base=8)", 6_461),
    "vit_b16_16384_parallel": (23_400, "none", 23_400),
    "vit_b16_16384_every4": (23_400, "every(4)", 5_850),
    "vit_b16_16384_qsr4": (23_400, "qsr(alpha=0.0175, h_base=4)", 3_771),
    "vit_b16_16384_every8": (23_400, "every(8)", 2_925),
    "vit_b16_16384_qsr8": (23_400, "qsr(alpha=0.0175, h_base=8)", 2_066),
    "resnet152_4096_linear_rule2": (62_400, "power(coef=0.346, exponent=1, h_base=2)", 25_546),
    "resnet152_4096_cubic_rule2": (62_400, "power(coef=0.167, exponent=3, h_base=2)", 24_460),
    "resnet152_4096_post_local4": (62_400, "post_local(switch=31980, h=4)", 39_585),
    "resnet152_4096_swap": (62_400, "swap(switch=47190)", 47_191),
    "vit_b16_4096_linear_rule4": (93_600, "power(coef=0.0391, exponent=1, h_base=4)", 11_872),
    "vit_b16_4096_cubic_rule4": (93_600, "power(coef=0.0134, exponent=3, h_base=4)", 8_628),
    "vit_b16_4096_post_local8": (93_600, "post_local(switch=51800, h=8)", 57_025),
    "vit_b16_4096_swap": (93_600, "swap(switch=72700)", 72_701),
    "resnet152_4096_parallel_linear_decay": (62_400, "none", 62_400),
    "resnet152_4096_qsr2_linear_decay": (62_400, "qsr(alpha=0.2, h_base=2)", 27_887),
    "resnet152_4096_parallel_step_decay": (62_400, "none", 62_400),
    "resnet152_4096_qsr2_step_decay": (62_400, "qsr(alpha=0.2, h_base=2)", 25_117),
    "vit_b16_4096_parallel_linear_decay": (93_600, "none", 93_600),
    "vit_b16_4096_qsr4_linear_decay": (93_600, "qsr(alpha=0.0175, h_base=4)", 8_741),
    "vit_b16_4096_parallel_step_decay": (93_600, "none", 93_600),
    "vit_b16_4096_qsr4_step_decay": (93_600, "qsr(alpha=0.0175, h_base=4)", 9_880),
    "resnet50_4096_parallel": (28_080, "none", 28_080),
    "resnet50_4096_qsr2": (28_080, "qsr(alpha=0.2, h_base=2)", 11_249),
}
# For `make test`: one file of each kind and model. The others run in `make test-thorough`.
NOW = [
    "resnet152_16384_qsr4",
    "resnet50_4096_parallel",
    "vit_b16_16384_qsr8",
    "vit_b16_4096_swap",
    "vit_b16_4096_qsr4_step_decay",
]
WEIGHTS = {"resnet152": 60_192_808, "resnet50": 25_557_032, "vit_b16": 86_381_800}
# BatchNorm's running means and variances, which a synchronisation averages as well.
STATISTICS = {"resnet152": 151_424, "resnet50": 53_120, "vit_b16": 0}
IMAGENET = RECIPES / "configs" / "imagenet"


# The paper's settings: of all runs, of each model, and peak lr and warm-up of each batch size.
EVERYWHERE = {"dataset": "imagenet", "crop_ratio": 224 / 256, "final_lr": 1e-6, "amp": "fp16"}
RESNET152: dict[str, Any] = {
    **{"model": "torchvision/resnet152", "epochs": 200, "accumulate": 8, "channels_last": True},
    **{"optimizer": "sgd", "momentum": 0.9, "nesterov": False, "weight_decay": 1e-4},
    **{"label_smoothing": 0.1, "randaugment_ops": 0, "mixup": 0.0, "clip_norm": 0.0},
    **{"bn_images": 4096},
}
MODELS: dict[str, dict[str, Any]] = {
    "resnet152": RESNET152,
    # Ours: all but the epochs.
    "resnet50": {**RESNET152, "model": "torchvision/resnet50", "epochs": 90},
    "vit_b16": {
        **{"model": "vit_pytorch/simple_b16", "epochs": 300, "accumulate": 2},
        **{"optimizer": "adamw", "beta1": 0.9, "beta2": 0.999, "label_smoothing": 0.0},
        **{"randaugment_ops": 2, "randaugment_magnitude": 10, "randaugment_variant": "composer"},
        **{"mixup": 0.2, "mixup_shares": "micro-batch"},
    },
}
LR_AND_WARMUP = {
    ("resnet152", 4096): (0.8, 1_560),
    # Ours: the learning rate, twice that of batch 4096.
    ("resnet152", 16384): (1.6, 390),
    ("resnet50", 4096): (0.8, 1_560),
    ("vit_b16", 4096): (0.008, 10_000),
    ("vit_b16", 16384): (0.016, 2_500),
}


def test_configurations_have_the_papers_settings() -> None:
    for name, (_, sync, _) in PUBLISHED.items():
        model, batch, method = parts_of(name)
        lr, warmup = LR_AND_WARMUP[model, batch]
        expected = {**EVERYWHERE, **MODELS[model], "lr": lr, "warmup_steps": warmup}
        expected |= {"batch_size": batch, "plan_ranks": batch // 256, "sync": sync}
        expected |= {"schedule": schedule_of(method), "out": f"runs/imagenet/{name}"}
        if model == "vit_b16":
            parallel = sync == "none"
            expected["weight_decay"] = 0.1 if parallel else 0.05
            expected["clip_norm"] = 1.0 if parallel else 0.0
        settings = configured(name)
        assert {key: getattr(settings, key) for key in expected} == expected, name
        made = build_optimizer(settings, torch.nn.Linear(2, 2))
        assert made.defaults.get("eps", 1e-8) == 1e-8
        assert made.param_groups[0]["weight_decay"] == settings.weight_decay
        assert len(made.param_groups) == 1


def parts_of(name: str) -> tuple[str, int, str]:
    model, batch, method = re.fullmatch(r"(\w+?)_(4096|16384)_(\w+)", name).groups()
    return model, int(batch), method


def schedule_of(method: str) -> str:
    if method.endswith("_step_decay"):
        return "step-cosine"
    return "linear" if method.endswith("_linear_decay") else "cosine"


def configured(name: str) -> Settings:
    return read_settings(["--config", str(IMAGENET / f"{name}.yaml"), "--dry-run"])


def test_every_configuration_has_its_synchronisations() -> None:
    assert {path.stem for path in IMAGENET.glob("*.yaml")} == PUBLISHED.keys()
    for name, (steps, sync, syncs) in PUBLISHED.items():
        settings = configured(name)
        per_epoch = 1_281_167 // settings.batch_size
        assert settings.epochs * per_epoch == steps
        if sync != "none":
            lr, warmup = lr_function(settings, per_epoch), settings.warmup_steps
            ends = torchcomp.sync_steps(sync, total_steps=steps, warmup_steps=warmup, lr=lr)
            assert sum(1 for _ in ends) == syncs, name
        share = f"{100 * syncs / steps:.1f}".removesuffix(".0")
        text = (IMAGENET / f"{name}.yaml").read_text()
        assert f"\n# {syncs:,} synchronisations in {steps:,} steps ({share} %).\n" in text
        assert "\n# Table: ImageNet" in text
        assert "\n# Expected: " in text


def test_the_readme_has_the_synchronisations_and_bytes_of_every_configuration() -> None:
    rows = (RECIPES / "README.md").read_text().splitlines()
    for name, (_, _, syncs) in PUBLISHED.items():
        (row,) = (row for row in rows if f"| [`{name}`](configs/imagenet/{name}.yaml) |" in row)
        assert f"| {syncs:,}" in row
        assert f" | {float(f'{bytes_of(name) / 1e12:.3g}'):#.3g} |" in row, name


def bytes_of(name: str) -> int:
    """Return the bytes that a rank sends: a ring all-reduce of float32 numbers per exchange."""
    model, batch, _ = parts_of(name)
    _, sync, syncs = PUBLISHED[name]
    ranks = batch // 256
    averaged = (WEIGHTS[model], 0 if sync == "none" else STATISTICS[model])
    return syncs * sum(2 * (ranks - 1) * 4 * numbers // ranks for numbers in averaged)


@pytest.mark.parametrize("model", ["resnet152", "vit_b16"])
def test_rules_begin_to_grow_at_the_learning_rate_of_qsr(model: str) -> None:
    base = {"resnet152": 2, "vit_b16": 4}[model]
    qsr = parse_schedule(configured(f"{model}_4096_qsr{base}").sync)
    begins = qsr.alpha / (base + 1) ** 0.5
    for name in ("linear", "cubic"):
        rule = parse_schedule(configured(f"{model}_4096_{name}_rule{base}").sync)
        assert rule.h_base == base
        # The coefficient has three digits.
        assert rule.coef == pytest.approx(begins * (base + 1) ** (1 / rule.exponent), rel=5e-3)


@pytest.mark.parametrize("name", only(PUBLISHED, now=NOW))
def test_published_configurations_dry_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from recipes import train

    settings = configured(name)
    train.print_plan(settings)
    steps, _, syncs = PUBLISHED[name]
    weights = WEIGHTS[parts_of(name)[0]]
    ranks = settings.batch_size // 256
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{weights:,} parameters" in shown
    assert f"ranks {ranks}, 256 images each per step steps {steps:,} " in shown
    assert f"synchronisations {syncs:,} bytes in all {bytes_of(name):,} sent by each rank" in shown


CONFIGS = sorted((RECIPES / "configs").rglob("*.yaml"))


@pytest.mark.parametrize(
    "config",
    only(CONFIGS, now=[path for path in CONFIGS if path.stem in NOW[1:4]]),
    ids=lambda p: p.stem,
)
def test_a_shrunken_copy_of_every_configuration_trains(
    config: Path, shrink_here: Callable[..., str]
) -> None:
    printed = shrink_here("--config", str(config), "--threads", "1", "--loader", "torchvision")
    # Post-local SGD and SWAP switch after the first step.
    steps = 2 if re.search("post_local|swap", config.stem) else 1
    assert f"1 ranks, {steps} steps" in printed
    assert re.search(rf"epoch +{steps}/{steps}: loss \d+\.\d+, test \d+\.\d%", printed)


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
    assert "vit_pytorch/simple_ti16 on folder: 2 ranks, 1 steps" in printed
    assert "MB sent" in printed
    assert " 0 MB sent" not in printed


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "simple_vit/b16"],
        ["--config", str(IMAGENET / "vit_b16_4096_qsr4.yaml"), "--image-size", "40"],
    ],
    ids=["model", "config"],
)
def test_a_dry_run_sends_an_image_through_the_model(flags: list[str]) -> None:
    from recipes import train

    with pytest.raises(RecipeError, match=r"--model (simple_vit/|vit_pytorch/simple_)b16 .*16"):
        train.print_plan(read_settings([*flags, "--dry-run"]))
