"""A rank's batches of a data set: which loader reads it, and what is known of it beforehand."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.errors import RecipeError
from recipes.image_data import sources
from recipes.image_data.augment import Augmentation, normalised
from recipes.image_data.beton import cached_beton, import_ffcv
from recipes.image_data.ffcv_reader import FfcvReader
from recipes.image_data.mixup import MixUp
from recipes.image_data.order import Indices, TrainOrder, test_shard
from recipes.image_data.presets import PRESETS, Preset
from recipes.image_data.randaugment import RandAugment
from recipes.image_data.torchvision_reader import TorchvisionReader
from recipes.settings import Settings

_TEST_BATCH = 256


@dataclass(frozen=True)
class Batches:
    """The training and test batches of one rank, augmented, normalised and on its device."""

    train_reader: Any
    test_reader: Any
    preset: Preset
    order: TrainOrder
    shard: Indices
    device: torch.device
    randaugment: RandAugment
    mixup: MixUp

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.train_reader.classes)

    @property
    def reproducible(self) -> bool:
        """Whether the same seed gives the same training images, bit for bit."""
        return bool(self.train_reader.reproducible)

    def train(self, epoch: int, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's batches of an epoch, from ``first_step`` on.

        Targets are labels (N), or with MixUp probabilities (N, classes).
        """
        augmentation = Augmentation(self.preset, self.order)
        rows = list(self.order.batches(epoch, first_step))
        batches = self.train_reader.batches(rows, epoch)
        for step, (images, labels) in enumerate(batches, start=first_step):
            images = augmentation(images.to(self.device), epoch, step)
            images = normalised(self.randaugment(images, epoch, step), self.preset)
            yield self.mixup(images, labels.to(self.device), epoch, step)

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of the test images, every one of them once."""
        starts = range(0, len(self.shard), _TEST_BATCH)
        rows = [self.shard[start : start + _TEST_BATCH] for start in starts]
        for images, labels in self.test_reader.batches(rows, epoch=0):
            yield normalised(images.to(self.device), self.preset), labels.to(self.device)


def open_batches(
    settings: Settings, rank: int, ranks: int, device: torch.device, workers: int
) -> Batches:
    """Open a data set for one of ``ranks`` ranks; whatever is wrong with it is raised here."""
    preset = preset_of(settings)
    loader = _chosen_loader(settings, rank)
    make = _ffcv_readers if loader == "ffcv" else _torchvision_readers
    train_reader, test_reader = make(settings, preset, workers)
    _check_classes(settings, train_reader, test_reader)
    order = TrainOrder(train_reader.samples, settings.batch_size, rank, ranks, settings.seed)
    return Batches(
        train_reader,
        test_reader,
        preset,
        order,
        test_shard(test_reader.samples, rank, ranks),
        device,
        RandAugment(settings.randaugment_ops, settings.randaugment_magnitude, order),
        MixUp(settings.mixup, train_reader.classes, order),
    )


def preset_of(settings: Settings) -> Preset:
    """Return what is known of the data set, with the photographs' crops as they were asked for."""
    preset = PRESETS[settings.dataset]
    if not preset.photographs:
        if settings.image_size:
            raise RecipeError(
                f"--image-size {settings.image_size} is for photographs: the images of --dataset "
                f"{settings.dataset} are {preset.size} x {preset.size}"
            )
        return preset
    size = settings.image_size or preset.size
    return replace(preset, size=size, crop_ratio=settings.crop_ratio)


@dataclass(frozen=True)
class Facts:
    """How large a data set is."""

    train_images: int
    test_images: int
    classes: int


def facts(settings: Settings) -> Facts:
    """Return a data set's sizes, without opening it where they are known beforehand."""
    preset = preset_of(settings)
    if preset.train_images:
        return Facts(preset.train_images, preset.test_images, preset.classes)
    train, test = _torchvision_readers(settings, preset, workers=0)
    return Facts(train.samples, test.samples, train.classes)


def _chosen_loader(settings: Settings, rank: int) -> str:
    if settings.loader == "torchvision":
        return "torchvision"
    try:
        import_ffcv()
        return "ffcv"
    except (ImportError, OSError) as error:
        return _without_ffcv(settings, rank, error)


def _without_ffcv(settings: Settings, rank: int, error: Exception) -> str:
    if settings.loader == "ffcv":
        raise RecipeError(
            f"--loader ffcv: ffcv cannot be imported ({error}); install the system packages "
            "pkg-config, libturbojpeg0-dev and libopencv-dev and then `pip install ffcv`, or use "
            "--loader torchvision"
        )
    if rank == 0:
        print(f"ffcv cannot be imported ({error}): using --loader torchvision", file=sys.stderr)
    return "torchvision"


def _source(settings: Settings) -> dict[str, Any]:
    if settings.dataset == "digits":
        return dict(sources.digits())
    path = Path(settings.data_path).expanduser()
    if not path.exists():
        raise RecipeError(f"--data-path {path} does not exist")
    return dict(
        sources.cifar10(path) if settings.dataset == "cifar10" else sources.photographs(path)
    )


def _torchvision_readers(
    settings: Settings, preset: Preset, workers: int
) -> list[TorchvisionReader]:
    source = _source(settings)
    return [
        TorchvisionReader(
            source[split], preset, train=split == "train", workers=workers, seed=settings.seed
        )
        for split in sources.SPLITS
    ]


def _ffcv_readers(settings: Settings, preset: Preset, workers: int) -> list[FfcvReader]:
    files = _written_betons(settings) or _cached_betons(settings)
    return [
        FfcvReader(files[split], preset, train=split == "train", workers=workers)
        for split in sources.SPLITS
    ]


def _written_betons(settings: Settings) -> dict[str, Path]:
    """Return the files that recipes.write_beton left in --data-path, if it did."""
    folder = Path(settings.data_path).expanduser()
    if settings.dataset == "digits" or not folder.is_dir():
        return {}
    if not any(folder.glob("*.beton")):
        return {}
    return {split: _only_beton(folder, sources.FILE_WORDS[split]) for split in sources.SPLITS}


def _only_beton(folder: Path, word: str) -> Path:
    files = sorted(folder.glob(f"{word}*.beton"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise RecipeError(
            f"{folder} must hold one {word}*.beton file, found {names}; "
            "python -m recipes.write_beton writes it"
        )
    return files[0]


def _cached_betons(settings: Settings) -> dict[str, Path]:
    """Convert a data set that is small enough to be converted while the user waits."""
    if settings.dataset in ("imagenet", "folder"):
        raise RecipeError(
            f"no .beton files in --data-path {settings.data_path}: write them with "
            "python -m recipes.write_beton, or read the images themselves with --loader torchvision"
        )
    folder, source = _cache_folder(settings), _source(settings)
    return {
        split: cached_beton(folder, f"{settings.dataset}-{split}", source[split])
        for split in sources.SPLITS
    }


def _cache_folder(settings: Settings) -> Path:
    if settings.data_cache:
        return Path(settings.data_cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torchcomp"


def _check_classes(settings: Settings, train: Any, test: Any) -> None:
    if train.classes < test.classes:
        raise RecipeError(
            f"--dataset {settings.dataset}: the test images have labels up to {test.classes - 1}, "
            f"the training images only up to {train.classes - 1}"
        )
