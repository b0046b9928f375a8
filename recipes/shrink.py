"""A shrunken copy of a configuration, which any machine trains in seconds (``--shrink``).

The copy has a smaller model of the same family and a few small random photographs. Optimizer,
schedules, augmentation, loss and method are those of the configuration.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from recipes.distributed import env_world_size
from recipes.settings import Settings
from torchcomp.local_sgd.schedules import TwoPhase
from torchcomp.specs.spec import parse_schedule

SMALLER = {
    "torchvision/resnet50": "torchvision/resnet18",
    "torchvision/resnet152": "torchvision/resnet18",
    "simple_vit/b16": "simple_vit/ti16",
    "vit_pytorch/simple_b16": "vit_pytorch/simple_ti16",
}
_CLASSES = 2
# The smallest multiple of ViT's patch size 16 with more than one patch per side.
_PIXELS = 32
_MICRO_BATCH = 2


def shrink(settings: Settings, folder: Path) -> Settings:
    """Return the shrunken configuration, and write its photographs to ``folder``.

    It trains for one step, or for two and switches between them if its schedule has a switch.
    """
    world_size = env_world_size()
    switching, drops = _switching_early(settings.sync), settings.schedule == "step"
    images = _MICRO_BATCH * settings.accumulate * world_size
    # One batch of training images, and test images for every rank and class.
    _write_photographs(folder / "photographs", train=images, test=max(_CLASSES, world_size))
    # fp16 needs CUDA. On a CPU, bf16 runs the same code of autocast.
    on_cuda = settings.device != "cpu" and torch.cuda.is_available()
    return replace(
        settings,
        dataset="folder",
        data_path=str(folder / "photographs"),
        # The photographs are not converted to .beton files.
        loader="torchvision",
        image_size=_PIXELS,
        model=SMALLER.get(settings.model, settings.model),
        batch_size=images,
        bn_images=min(settings.bn_images, images),
        epochs=2 if drops or switching else 1,
        milestones=(1,) if drops else (),
        sync=switching or settings.sync,
        # A run of one step has no room for warm-up.
        warmup_steps=0,
        amp="bf16" if settings.amp == "fp16" and not on_cuda else settings.amp,
        workers=1,
        checkpoint_every=0,
        resume=False,
        out=str(folder / "run"),
        dry_run=False,
        shrink=False,
    )


def _switching_early(sync: str) -> str | None:
    schedule = None if sync == "none" else parse_schedule(sync)
    return str(replace(schedule, switch=1)) if isinstance(schedule, TwoPhase) else None


def _write_photographs(folder: Path, *, train: int, test: int) -> None:
    random = np.random.default_rng(0)
    for split, count in (("train", train), ("val", test)):
        for index in range(count):
            path = folder / split / str(index % _CLASSES) / f"{index}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 256, (48, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
