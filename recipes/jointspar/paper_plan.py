"""The plan of a run in the paper's setting, for ``--dry-run``."""

import torch

import torchcomp
from recipes.errors import RecipeError
from recipes.jointspar.image_sets import SIZES
from recipes.jointspar.methods import LayerSampling, Method
from recipes.jointspar.paper_setting import Setting
from recipes.options import as_plain_dict
from recipes.plan import as_text
from torchcomp.jointspar import check_several, default_layers


def describe(setting: Setting, workers: int) -> str:
    """Return the configuration, the layers, and the bytes that a run on ``workers`` would send."""
    sizes = SIZES[setting.dataset]
    steps_per_epoch = sizes.train_images // (workers * setting.batch)
    if not steps_per_epoch:
        raise RecipeError(
            f"{workers} workers with --batch {setting.batch} need more images than the "
            f"{sizes.train_images:,} of {setting.dataset}: choose fewer workers or a smaller batch"
        )
    hyperparameters = setting.hyperparameters(steps_per_epoch, workers)
    # The meta device allocates no weights.
    with torch.device("meta"):
        module = setting.module()
    layers = default_layers(module.named_parameters())
    check_several(layers)
    dense = torchcomp.explain("mean", model=module, world_size=workers).dense_bytes_sent
    sent = _share(setting.exchange, workers) * dense
    rows = {
        "images": f"{sizes.train_images:,} to train, {sizes.test_images:,} to test",
        "batch": f"{workers} workers x {setting.batch}",
        "steps": f"{hyperparameters.steps:,} ({setting.epochs} epochs of {steps_per_epoch:,})",
        "learning rate": f"{hyperparameters.lr_at(0):g} first, {hyperparameters.lr:g} after "
        f"{hyperparameters.warmup:,} steps of warm-up, "
        f"{hyperparameters.lr_at(hyperparameters.steps - 1):g} last",
        "layers": f"{len(layers)}: {', '.join([*layers][:3])}, ..., {[*layers][-1]}",
        "bytes per step": f"{sent:,.0f} at first, {dense:,} dense",
    }
    return as_text(as_plain_dict(setting), rows)


def _share(method: Method, workers: int) -> float:
    """Return the expected share of dense DDP's bytes, while all layers have the same p."""
    if isinstance(method, LayerSampling) and not method.shared:
        # The ranks exchange every layer that any of them keeps.
        return 1 - (1 - method.budget) ** workers
    return method.budget
