"""One rank's batches of a data set, and the choice of the loader that reads it."""

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
from recipes.image_data.augment import Augmentation, normalise
from recipes.image_data.beton import INSTALL_FFCV, cached_beton, import_ffcv
from recipes.image_data.ffcv_reader import FfcvReader
from recipes.image_data.mixup import MixUp
from recipes.image_data.order import Indices, TrainOrder, test_shard
from recipes.image_data.presets import PRESETS, Preset
from recipes.image_data.randaugment import RandAugment
from recipes.image_data.torchvision_reader import TorchvisionReader
from recipes.settings import Settings

# Test accuracy does not depend on it.
_TEST_BATCH = 256


@dataclass(frozen=True)
class Batches:
    """The training and test batches of one rank, augmented, normalised and on its device.

    Attributes:
        train_reader: reads the training images, an ``FfcvReader`` or a ``TorchvisionReader``.
        test_reader: reads the test images.
        preset: statistics and augmentation of the data set.
        order: which training images this rank gets at which step.
        shard: the test images of this rank.
        device: of the batches.
        randaugment: applied after mirroring and shifts.
        mixup: applied last.
    """

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
        """Whether the training images depend on the seed only, bit for bit."""
        return bool(self.train_reader.reproducible)

    def train(self, epoch: int, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's images and targets of an epoch, beginning at ``first_step``.

        Images have shape (N, C, H, W). Targets are labels (N) or, with MixUp, probabilities
        (N, classes).
        """
        augmentation = Augmentation(self.preset, self.order)
        rows = list(self.order.batches(epoch, first_step))
        batches = self.train_reader.batches(rows, epoch)
        for step, (images, labels) in enumerate(batches, start=first_step):
            # After the loader, on the device: the same operations for both loaders.
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
    """Open a data set for one rank.

    Raises:
        RecipeError: if the data set is missing, damaged or empty, or if it is too small for the
            batch size or the number of ranks.
    """
    preset = preset_of(settings)
    loader = _chosen_loader(settings, rank)
    make = _ffcv_readers if loader == "ffcv" else _torchvision_readers
    train_reader, test_reader = make(settings, preset, workers)
    _check_classes(settings, train_reader, test_reader)
    order = TrainOrder(train_reader.samples, settings.batch_size, rank, world_size, settings.seed)
    return Batches(
        train_reader,
        test_reader,
        preset,
        order,
        test_shard(test_reader.samples, rank, world_size),
        device,
        RandAugment(
            settings.randaugment_ops,
            settings.randaugment_magnitude,
            order,
            settings.randaugment_variant,
        ),
        MixUp(
            settings.mixup,
            train_reader.classes,
            order,
            settings.mixup_shares,
            settings.accumulate,
        ),
    )


def preset_of(settings: Settings) -> Preset:
    """Return the preset of the data set, with the crops that the settings choose.

    Raises:
        RecipeError: if ``--image-size`` is set for images of a fixed size.
    """
    preset = PRESETS[settings.dataset]
    if not preset.photographs:
        if settings.image_size:
            raise RecipeError(
                f"--image-size {settings.image_size} is for photographs only; the images of "
                f"--dataset {settings.dataset} are {preset.size} x {preset.size}, so leave it out"
            )
        return preset
    size = settings.image_size or preset.size
    return replace(preset, size=size, crop_ratio=settings.crop_ratio)


@dataclass(frozen=True)
class DatasetSizes:
    """Number of images and classes of a data set."""

    train_images: int
    test_images: int
    classes: int


def dataset_sizes(settings: Settings) -> DatasetSizes:
    """Return the sizes of a data set. Only an image folder must be opened for that."""
    preset = preset_of(settings)
    if preset.train_images:
        return DatasetSizes(preset.train_images, preset.test_images, preset.classes)
    # Counting files needs no ffcv, and no .beton files.
    train, test = _torchvision_readers(settings, preset, workers=0)
    return DatasetSizes(train.samples, test.samples, train.classes)


def _chosen_loader(settings: Settings, rank: int) -> str:
    if settings.loader == "torchvision":
        return "torchvision"
    try:
        import_ffcv()
        return "ffcv"
    # OSError: a system library that ffcv links to is missing.
    except (ImportError, OSError) as error:
        return _without_ffcv(settings, rank, error)


def _without_ffcv(settings: Settings, rank: int, error: Exception) -> str:
    if settings.loader == "ffcv":
        raise RecipeError(
            f"--loader ffcv: ffcv cannot be imported ({error}); {INSTALL_FFCV}, or use "
            "--loader torchvision"
        )
    if rank == 0:
        print(
            f"note: --loader torchvision, because ffcv is not available ({error})", file=sys.stderr
        )
    return "torchvision"


def _source(settings: Settings) -> dict[str, Any]:
    if settings.dataset == "digits":
        return dict(sources.digits())
    path = Path(settings.data_path).expanduser()
    if not path.exists():
        raise RecipeError(
            f"--data-path {path} does not exist; expected the data of --dataset {settings.dataset}"
        )
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
    # Files that the user wrote come first, also for CIFAR-10.
    files = _beton_files(settings) or _cached_beton_files(settings)
    return [
        FfcvReader(files[split], preset, train=split == "train", workers=workers)
        for split in sources.SPLITS
    ]


def _beton_files(settings: Settings) -> dict[str, Path]:
    """Return the .beton files in ``--data-path``, or an empty dict if there are none."""
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
            f"--data-path {folder}: expected one {word}*.beton file, found {names}; "
            "write it with python -m recipes.write_beton"
        )
    return files[0]


def _cached_beton_files(settings: Settings) -> dict[str, Path]:
    """Return .beton files of a small data set from the cache. Write them on first use."""
    # Photographs take too long to convert, and too much space, to do it without a command.
    if settings.dataset in ("imagenet", "folder"):
        raise RecipeError(
            f"no .beton files in --data-path {settings.data_path}: write them with "
            "python -m recipes.write_beton, or use --loader torchvision with the image folder"
        )
    # Read the source in each run: the cached file is valid for its content only.
    folder, source = _cache_folder(settings), _source(settings)
    return {
        split: cached_beton(folder, f"{settings.dataset}-{split}", source[split])
        for split in sources.SPLITS
    }


def _cache_folder(settings: Settings) -> Path:
    if settings.data_cache:
        return Path(settings.data_cache).expanduser()
    # The cache folder of the XDG base directory specification.
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torchcomp"


def _check_classes(settings: Settings, train: Any, test: Any) -> None:
    # A label that the model has no output for would fail inside the loss, on the device.
    if train.classes < test.classes:
        raise RecipeError(
            f"--dataset {settings.dataset}: the test images have {test.classes} classes but the "
            f"training images only {train.classes}; both need the same classes"
        )
