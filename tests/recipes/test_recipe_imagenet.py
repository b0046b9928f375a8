"""The ImageNet configurations: their synchronisations and bytes, dry runs and shrunken copies."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import torchcomp
from recipes.errors import RecipeError
from recipes.optimizers import lr_function
from recipes.settings import Settings, read_settings
from tests.recipes.conftest import TorchRun
from tests.recipes.forked_ranks import RECIPES
from tests.support.cases import only, thorough
from torchcomp.specs.spec import parse_schedule

IMAGENET = RECIPES / "configs" / "imagenet"
# A line of the page: name, method, synchronisations and terabytes.
ROW = re.compile(
    r"\| \[`(\w+)`\]\(configs/imagenet/\w+\.yaml\) \|.*?\| ([\d,]+)[^|]*\| ([\d.]+) \|"
)
PUBLISHED = {
    name: (int(syncs.replace(",", "")), terabytes)
    for name, syncs, terabytes in ROW.findall((RECIPES / "README.md").read_text())
}
# For `make test`: one file of each kind and model. The others run in `make test-thorough`.
NOW = ["resnet152_16384_qsr4", "resnet50_4096_parallel", "vit_b16_16384_qsr8"]
NOW += ["vit_b16_4096_swap", "vit_b16_4096_qsr4_step_decay"]
WEIGHTS = {"resnet152": 60_192_808, "resnet50": 25_557_032, "vit_b16": 86_381_800}
# BatchNorm's running means and variances, which a synchronisation averages as well.
STATISTICS = {"resnet152": 151_424, "resnet50": 53_120, "vit_b16": 0}


def configured(name: str) -> Settings:
    return read_settings(["--config", str(IMAGENET / f"{name}.yaml"), "--dry-run"])


def bytes_of(name: str, syncs: int) -> int:
    """Return the bytes that a rank sends: a ring all-reduce of float32 numbers per exchange."""
    settings, model = configured(name), name.partition("_4096")[0].partition("_16384")[0]
    ranks = settings.batch_size // 256
    averaged = (WEIGHTS[model], 0 if settings.sync == "none" else STATISTICS[model])
    return syncs * sum(2 * (ranks - 1) * 4 * numbers // ranks for numbers in averaged)


def test_every_configuration_has_the_synchronisations_and_bytes_of_the_page() -> None:
    assert {path.stem for path in IMAGENET.glob("*.yaml")} == PUBLISHED.keys()
    for name, (syncs, terabytes) in PUBLISHED.items():
        settings = configured(name)
        per_epoch = 1_281_167 // settings.batch_size
        steps = settings.epochs * per_epoch
        counted = steps
        if settings.sync != "none":
            lr, warmup = lr_function(settings, per_epoch), settings.warmup_steps
            ends = torchcomp.sync_steps(
                settings.sync, total_steps=steps, warmup_steps=warmup, lr=lr
            )
            counted = sum(1 for _ in ends)
        assert counted == syncs, name
        assert f"{float(f'{bytes_of(name, syncs) / 1e12:.3g}'):#.3g}" == terabytes, name
        share = f"{100 * syncs / steps:.1f}".removesuffix(".0")
        text = (IMAGENET / f"{name}.yaml").read_text()
        assert f"\n# {syncs:,} synchronisations in {steps:,} steps ({share} %).\n" in text


@pytest.mark.parametrize("model", ["resnet152", "vit_b16"])
def test_rules_begin_to_grow_at_the_learning_rate_of_qsr(model: str) -> None:
    base = {"resnet152": 2, "vit_b16": 4}[model]
    qsr = parse_schedule(configured(f"{model}_4096_qsr{base}").sync)
    begins = qsr.alpha / (base + 1) ** 0.5
    for name in ("linear", "cubic"):
        rule = parse_schedule(configured(f"{model}_4096_{name}_rule{base}").sync)
        # The coefficient has three digits.
        assert rule.coef == pytest.approx(begins * (base + 1) ** (1 / rule.exponent), rel=5e-3)


@pytest.mark.parametrize("name", only(PUBLISHED, now=NOW))
def test_published_configurations_dry_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from recipes import train

    settings, (syncs, _) = configured(name), PUBLISHED[name]
    train.print_plan(settings)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"ranks {settings.batch_size // 256}, 256 images each per step" in shown
    sent = bytes_of(name, syncs)
    assert f"synchronisations {syncs:,} bytes in all {sent:,} sent by each rank" in shown


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
    steps = 2 if re.search("post_local|swap", str(config)) else 1
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
    assert "vit_pytorch/simple_ti16 on folder: 2 ranks, 1 steps" in printed
    assert "MB sent" in printed
    assert " 0 MB sent" not in printed


def test_a_dry_run_sends_an_image_through_the_model() -> None:
    from recipes import train

    with pytest.raises(RecipeError, match=r"--model simple_vit/b16 .*16"):
        train.print_plan(read_settings(["--model", "simple_vit/b16", "--dry-run"]))
