"""The data sets of the paper, read from where they lie; nothing is ever downloaded."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from recipes.image_data.augment import Augmentation
from recipes.image_data.in_memory import Split, standardised
from recipes.image_data.order import TrainOrder
from recipes.image_data.public_sets import read_public

_TEST_BATCH = 1000


@dataclass(frozen=True)
class Facts:
    """Sizes of a data set, as its authors give them."""

    train_images: int
    test_images: int
    channels: int
    size: int
    classes: int


FACTS = {
    "digits": Facts(1442, 355, 1, 8, 10),
    "mnist": Facts(60_000, 10_000, 1, 28, 10),
    "fashion-mnist": Facts(60_000, 10_000, 1, 28, 10),
    "svhn": Facts(73_257, 26_032, 3, 32, 10),
    "cifar10": Facts(50_000, 10_000, 3, 32, 10),
    "cifar100": Facts(50_000, 10_000, 3, 32, 100),
    "imagenet": Facts(1_281_167, 50_000, 3, 224, 1000),
}


@dataclass(frozen=True)
class Images:
    """A data set in memory.

    Attributes:
        train: to train on.
        validation: held out of it, to choose a learning rate by; may be empty.
        test: looked at last.
    """

    train: Split
    validation: Split
    test: Split


@dataclass
class Batches:
    """One rank's batches of a data set in memory, in the recipes' order."""

    images: Images
    order: TrainOrder
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        self._epoch, self._rows = -1, torch.empty(0)

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole batches in an epoch."""
        return self.order.steps_per_epoch

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's images and labels at a step."""
        epoch, place = divmod(step, self.order.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, torch.from_numpy(self.order.batches(epoch))
        chosen = self.images.train.take(self._rows[place])
        if self.augmentation is None:
            return chosen.images, chosen.labels
        pixels = self.augmentation(chosen.images.permute(0, 2, 3, 1), epoch, place)
        return pixels.permute(0, 3, 1, 2).contiguous(), chosen.labels

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Accuracy in per cent on the images held out (NaN if there are none) and on the test's."""
        return accuracy(model, self.images.validation), accuracy(model, self.images.test)


@torch.no_grad()
def accuracy(model: nn.Module, split: Split) -> float:
    """Per cent of a split that a model gets right; NaN of an empty one."""
    if not len(split.labels):
        return float("nan")
    device = next(model.parameters()).device
    model.eval()
    batches = split.images.split(_TEST_BATCH)
    answers = torch.cat([model(images.to(device)).argmax(1).cpu() for images in batches])
    model.train()
    return 100 * float((answers == split.labels).float().mean())


def open_images(name: str, folder: Path | None, hold_out: int = 6) -> Images:
    """Read a data set and standardise it.

    Args:
        name: one of those that fit into memory.
        folder: where it lies; digits needs none.
        hold_out: one of so many training images is held out; 0 holds out none.

    Raises:
        RecipeError: if the data set is unknown, or does not lie in `folder`.
    """
    return Images(*standardised(read_public(name, folder), hold_out))
