"""One rank's batches of a data set, and the choice of the loader that reads it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.errors import RecipeError
from recipes.image_data.augment import Augmentation, MixUp, RandAugment, normalise
from recipes.image_data.order import Indices, TrainOrder, test_shard
from recipes.image_data.presets import PRESETS, Preset
from recipes.image_data.readers import FfcvReader, FileReader, MemoryReader
from recipes.image_data.sources import FILE_WORDS, SPLITS, photographs, read_public
from recipes.settings import Settings

# Test accuracy does not depend on it.
_TEST_BATCH = 256


@dataclass(frozen=True)
class Batches:
    """The training and test batches of one rank, augmented, normalised and on its device."""

    train_reader: Any
    test_reader: Any
    preset: Preset
    order: TrainOrder  # which training images this rank gets at which step
    shard: Indices  # the test images of this rank
    device: torch.device
    randaugment: RandAugment
    mixup: MixUp

    @property
    def classes(self) -> int:
        return int(self.train_reader.classes)

    @property
    def reproducible(self) -> bool:
        """Whether the training images depend on the seed only, bit for bit."""
        return bool(self.train_reader.reproducible)

    def train(self, epoch: int, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's images and targets of an epoch, beginning at ``first_step``."""
        augmentation = Augmentation(self.preset, self.order)
        rows = list(self.order.batches(epoch, first_step))
        batches = self.train_reader.batches(rows, epoch)
        for step, (images, labels) in enumerate(batches, start=first_step):
            # After the loader, on the device: the same operations for all loaders.
            images = augmentation(images.to(self.device), epoch, step)
            images = normalise(self.randaugment(images, epoch, step), self.preset)
            # Last, because the operations above work on bytes and MixUp needs floats.
            yield self.mixup(images, labels.to(self.device), epoch, step)

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's test images (N, C, H, W) and labels (N), each once."""
        starts = range(0, len(self.shard), _TEST_BATCH)
        rows = [self.shard[start : start + _TEST_BATCH] for start in starts]
        for images, labels in self.test_reader.batches(rows, epoch=0):
            yield normalise(images.to(self.device), self.preset), labels.to(self.device)


def open_batches(
    settings: Settings, rank: int, world_size: int, device: torch.device, workers: int
) -> Batches:
    preset = preset_of(settings)
    train, test = _readers(settings, preset, workers)
    # A label that the model has no output for would fail inside the loss, on the device.
    if train.classes < test.classes:
        raise RecipeError(
            f"--dataset {settings.dataset}: the test images have {test.classes} classes but the "
            f"training images only {train.classes}; both need the same classes"
        )
    order = TrainOrder(train.samples, settings.batch_size, rank, world_size, settings.seed)
    randaugment = RandAugment(settings.randaugment_ops, settings.randaugment_magnitude, order)
    mixup = MixUp(settings.mixup, train.classes, order, settings.mixup_shares, settings.accumulate)
    shard = test_shard(test.samples, rank, world_size)
    return Batches(train, test, preset, order, shard, device, randaugment, mixup)


def preset_of(settings: Settings) -> Preset:
    """Return the preset of the data set, with the crops that the settings choose."""
    preset = PRESETS[settings.dataset]
    if preset.photographs:
        size = settings.image_size or preset.size
        return replace(preset, size=size, crop_ratio=settings.crop_ratio)
    if settings.image_size:
        raise RecipeError(
            f"--image-size {settings.image_size} is for photographs only; the images of "
            f"--dataset {settings.dataset} are {preset.size} x {preset.size}, so leave it out"
        )
    return preset


@dataclass(frozen=True)
class DatasetSizes:
    train_images: int
    test_images: int
    classes: int


def dataset_sizes(settings: Settings) -> DatasetSizes:
    """Return the sizes of a data set. Only an image folder must be opened for that."""
    preset = preset_of(settings)
    if preset.train_images:
        return DatasetSizes(preset.train_images, preset.test_images, preset.classes)
    train, test = _readers(settings, preset, workers=0)
    return DatasetSizes(train.samples, test.samples, train.classes)


def _readers(settings: Settings, preset: Preset, workers: int) -> list[Any]:
    path = Path(settings.data_path).expanduser() if settings.data_path else None
    if not preset.photographs:
        if settings.loader == "ffcv":
            raise RecipeError(
                f"--loader ffcv is for photographs; --dataset {settings.dataset} is kept in memory"
            )
        source = read_public(settings.dataset, path)
        return [MemoryReader(source[split]) for split in SPLITS]
    if path is None or not path.exists():
        raise RecipeError(
            f"--data-path {settings.data_path} does not exist; expected the data of --dataset "
            f"{settings.dataset}"
        )
    if settings.loader == "ffcv" or (settings.loader == "auto" and [*path.glob("*.beton")]):
        return [
            FfcvReader(_beton(path, split), preset, train=split == "train", workers=workers)
            for split in SPLITS
        ]
    files, seed = photographs(path), settings.seed
    return [
        FileReader(files[split], preset, train=split == "train", workers=workers, seed=seed)
        for split in SPLITS
    ]


def _beton(folder: Path, split: str) -> Path:
    word = FILE_WORDS[split]
    files = sorted(folder.glob(f"{word}*.beton"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise RecipeError(
            f"--data-path {folder}: expected one {word}*.beton file, found {names}; "
            "write it with python -m recipes.write_beton, or use --loader torchvision with the "
            "image folder"
        )
    return files[0]
