"""What a run in the paper's setting would do, without doing it."""

import torch

import torchcomp
from recipes.errors import RecipeError
from recipes.jointspar.image_sets import FACTS
from recipes.jointspar.paper_setting import Setting
from recipes.options import resolved
from recipes.plan import as_text
from torchcomp.jointspar import check_several, default_layers


def describe(setting: Setting, workers: int) -> str:
    """Return the configuration, the layers, and what a run on so many workers would send."""
    facts = FACTS[setting.dataset]
    steps_per_epoch = facts.train_images // (workers * setting.batch)
    if not steps_per_epoch:
        raise RecipeError(
            f"{workers} workers of {setting.batch} images are more than {setting.dataset}'s "
            f"{facts.train_images:,}: an epoch would have no step"
        )
    course = setting.course(steps_per_epoch, workers)
    with torch.device("meta"):
        module = setting.module()
    layers = default_layers(module.named_parameters())
    check_several(layers)
    dense = torchcomp.explain("mean", model=module, world_size=workers).dense_bytes_sent
    rows = {
        "images": f"{facts.train_images:,} to train, {facts.test_images:,} to test",
        "batch": f"{workers} workers x {setting.batch}",
        "steps": f"{course.steps:,} ({setting.epochs} epochs of {steps_per_epoch:,})",
        "rate": f"{course.rate_at(0):g} first, {course.rate:g} after {course.warmup:,} steps of "
        f"warm-up, {course.rate_at(course.steps - 1):g} last",
        "layers": f"{len(layers)}: {', '.join([*layers][:3])}, ..., {[*layers][-1]}",
        "bytes of a step": f"{setting.budget * dense:,.0f} at first, {dense:,} dense",
    }
    return as_text(resolved(setting), rows)
