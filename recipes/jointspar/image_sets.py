"""The data sets of the paper, read from local files. Nothing is ever downloaded."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from recipes.image_data.augment import Augmentation
from recipes.image_data.in_memory import Split, standardise
from recipes.image_data.order import TrainOrder
from recipes.image_data.public_sets import read_public

_TEST_BATCH = 1000


@dataclass(frozen=True)
class ImageSetSizes:
    """Sizes of a data set, as its authors give them."""

    train_images: int
    test_images: int
    channels: int
    size: int
    classes: int


SIZES = {
    "digits": ImageSetSizes(1442, 355, 1, 8, 10),
    "mnist": ImageSetSizes(60_000, 10_000, 1, 28, 10),
    "fashion-mnist": ImageSetSizes(60_000, 10_000, 1, 28, 10),
    "svhn": ImageSetSizes(73_257, 26_032, 3, 32, 10),
    "cifar10": ImageSetSizes(50_000, 10_000, 3, 32, 10),
    "cifar100": ImageSetSizes(50_000, 10_000, 3, 32, 100),
    "imagenet": ImageSetSizes(1_281_167, 50_000, 3, 224, 1000),
}


@dataclass(frozen=True)
class ImageSet:
    """A data set in memory.

    Attributes:
        train: images to train on.
        validation: training images that are held out to choose a learning rate. Can be empty.
        test: images that measure the final accuracy.
    """

    train: Split
    validation: Split
    test: Split


@dataclass
class Batches:
    """One rank's batches of a data set in memory, in the recipes' order."""

    images: ImageSet
    order: TrainOrder
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        # The order of the current epoch is cached, because a permutation per step would be slow.
        self._epoch, self._rows = -1, torch.empty(0)

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole batches in an epoch."""
        return self.order.steps_per_epoch

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's images and labels at a step."""
        epoch, index = divmod(step, self.order.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, torch.from_numpy(self.order.batches(epoch))
        chosen = self.images.train.take(self._rows[index])
        if self.augmentation is None:
            return chosen.images, chosen.labels
        # The augmentation works on NHWC images.
        pixels = self.augmentation(chosen.images.permute(0, 2, 3, 1), epoch, index)
        return pixels.permute(0, 3, 1, 2).contiguous(), chosen.labels

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Return the accuracies on the held-out images (NaN if none) and the test images."""
        return accuracy(model, self.images.validation), accuracy(model, self.images.test)


@torch.no_grad()
def accuracy(model: nn.Module, split: Split) -> float:
    """Return the accuracy in per cent, or NaN if the split is empty."""
    if not len(split.labels):
        return float("nan")
    device = next(model.parameters()).device
    model.eval()
    batches = split.images.split(_TEST_BATCH)
    predictions = torch.cat([model(images.to(device)).argmax(1).cpu() for images in batches])
    model.train()
    return 100 * float((predictions == split.labels).float().mean())


def open_images(name: str, folder: Path | None, hold_out: int = 6) -> ImageSet:
    """Read a data set and standardise it.

    Args:
        name: a data set that fits into memory.
        folder: the folder of its files. digits needs none.
        hold_out: every ``hold_out``-th training image is held out. 0 holds out none.

    Raises:
        RecipeError: If the data set is unknown or is not in ``folder``.
    """
    return ImageSet(*standardise(read_public(name, folder), hold_out))
