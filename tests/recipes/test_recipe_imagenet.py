"""The configurations: the counts of the page, dry runs, and steps on small photographs."""

import re

import pytest

import torchcomp
from recipes import train
from recipes.errors import RecipeError
from recipes.optimizers import lr_function
from recipes.options import read_yaml
from recipes.settings import Settings, read_settings
from tests.recipes.runs import RECIPES
from tests.support.cases import only

CONFIGS = {path.stem: path for path in sorted((RECIPES / "configs").rglob("*.yaml"))}
# A line of the page: name, method, synchronisations and terabytes.
ROW = re.compile(
    r"\| \[`(\w+)`\]\(configs/imagenet/\w+\.yaml\) \|.*?\| ([\d,]+)[^|]*\| ([\d.]+) \|"
)
PUBLISHED = {
    name: (int(syncs.replace(",", "")), terabytes)
    for name, syncs, terabytes in ROW.findall((RECIPES / "README.md").read_text())
}
# For `make test`: one file of each kind and model. The others run in `make test-thorough`.
NOW = ["digits", "resnet152_16384_qsr4", "resnet50_4096_parallel", "vit_b16_16384_qsr8"]
NOW += ["vit_b16_4096_swap", "vit_b16_4096_qsr4_step_decay"]
WEIGHTS = {"resnet152": 60_192_808, "resnet50": 25_557_032, "vit_b16": 86_381_800}
# BatchNorm's running means and variances, which a synchronisation averages as well.
STATISTICS = {"resnet152": 151_424, "resnet50": 53_120, "vit_b16": 0}
SMALLER = dict.fromkeys(("torchvision/resnet50", "torchvision/resnet152"), "torchvision/resnet18")
SMALLER["vit_pytorch/simple_b16"] = "vit_pytorch/simple_ti16"


def configured(name):
    return read_settings(["--config", str(CONFIGS[name]), "--dry-run"])


def bytes_of(name, syncs):
    """Return the bytes that a rank sends: a ring all-reduce of float32 numbers per exchange."""
    settings, model = configured(name), name.partition("_4096")[0].partition("_16384")[0]
    ranks = settings.batch_size // 256
    averaged = (WEIGHTS[model], 0 if settings.sync == "none" else STATISTICS[model])
    return syncs * sum(2 * (ranks - 1) * 4 * numbers // ranks for numbers in averaged)


def test_every_configuration_has_the_synchronisations_and_bytes_of_the_page():
    assert {n for n, path in CONFIGS.items() if path.parent.name == "imagenet"} == {*PUBLISHED}
    for name, (syncs, terabytes) in PUBLISHED.items():
        settings = configured(name)
        per_epoch = 1_281_167 // settings.batch_size
        steps = settings.epochs * per_epoch
        lr, warmup = lr_function(settings, per_epoch), settings.warmup_steps
        rule = "every(1)" if settings.sync == "none" else settings.sync
        ends = torchcomp.sync_steps(rule, total_steps=steps, warmup_steps=warmup, lr=lr)
        assert len(list(ends)) == syncs, name
        assert f"{float(f'{bytes_of(name, syncs) / 1e12:.3g}'):#.3g}" == terabytes, name
        share = f"{100 * syncs / steps:.1f}".removesuffix(".0")
        text = CONFIGS[name].read_text()
        assert f"\n# {syncs:,} synchronisations in {steps:,} steps ({share} %).\n" in text


@pytest.mark.parametrize("name", only(CONFIGS, now=NOW))
def test_configurations_dry_run(name, capsys):
    assert "\n# Run:" in CONFIGS[name].read_text()
    ranks = configured(name).batch_size // 256 if name in PUBLISHED else 4
    flags = ["--config", str(CONFIGS[name]), "--dry-run", "--plan-ranks", str(ranks)]
    train.print_plan(read_settings(flags))
    shown = " ".join(capsys.readouterr().out.split())
    assert "plan model " in shown
    if name in PUBLISHED:
        syncs, sent = PUBLISHED[name][0], bytes_of(name, PUBLISHED[name][0])
        assert f"ranks {ranks}, 256 images each per step" in shown
        assert f"synchronisations {syncs:,} bytes in all {sent:,} sent by each rank" in shown


@pytest.mark.parametrize("name", only(CONFIGS, now=NOW[1:4]))
def test_a_step_of_every_configuration_on_small_photographs(name, train_here, photo_flags):
    raw, steps = read_yaml(Settings, CONFIGS[name]), 1
    model = raw.get("model", "smallcnn")
    flags = ["--model", SMALLER.get(model, model), "--batch-size", "12"]
    flags += ["--accumulate", str(min(raw.get("accumulate", 1), 2)), "--warmup-steps", "0"]
    flags += ["--bn-images", "12", "--amp", "bf16" if "amp" in raw else "off"]
    if re.match(r"(post_local|swap)\(", raw.get("sync", "")):
        # It switches after the first of two steps.
        sync, steps = re.sub(r"switch=\d+", "switch=1", raw["sync"]), 2
        flags += ["--sync", sync, "--epochs", "2"]
    summary = train_here("--config", str(CONFIGS[name]), *photo_flags, *flags)
    assert summary["steps"] == steps
    assert 0 <= summary["test_accuracy"] <= 1


def test_a_dry_run_sends_an_image_through_the_model():
    with pytest.raises(RecipeError, match=r"--model simple_vit/b16 .*16"):
        train.print_plan(read_settings(["--model", "simple_vit/b16", "--dry-run"]))
