"""Models by name, learning rates, and the configurations that use them."""

import math
import re

import numpy as np
import pytest
import torch

import torchcomp
from recipes import train
from recipes.models import build_model
from recipes.optimizers import build_optimizer, lr_function
from recipes.settings import Settings, read_settings
from recipes.simple_vit import sin_cos_positions
from tests.recipes.runs import RECIPES
from tests.support.cases import only
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
def test_a_shrunken_copy_of_every_configuration_trains(name, train_here, capsys):
    train_here("--config", str(CONFIGS[name]), "--threads", "1", "--shrink")
    # Post-local SGD and SWAP switch after the first step.
    steps = 2 if re.search("post_local|swap", name) else 1
    printed = capsys.readouterr().out
    assert f"1 ranks, {steps} steps" in printed
    assert re.search(rf"epoch +{steps}/{steps}: loss \d+\.\d+, test \d+\.\d%", printed)
