"""What a run in the paper's setting trains on: images in memory, or photographs."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.errors import RecipeError
from recipes.image_data import Batches as PhotographBatches
from recipes.image_data import open_batches
from recipes.image_data.augment import Augmentation
from recipes.image_data.order import TrainOrder
from recipes.image_data.presets import Preset
from recipes.jointspar.image_sets import FACTS, Batches, open_images
from recipes.jointspar.paper_setting import Setting
from recipes.ranks import Ranks, threads_of
from recipes.settings import Settings


class Photographs:
    """ImageNet, decoded as it is asked for; the test images are shared out among the ranks."""

    def __init__(self, batches: PhotographBatches) -> None:
        self._batches = batches
        self._stream: Iterator[tuple[Tensor, Tensor]] = iter(())

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole batches in an epoch."""
        return self._batches.order.steps_per_epoch

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's images and labels; steps are asked for in order."""
        epoch, place_in_epoch = divmod(step, self.steps_per_epoch)
        if not place_in_epoch:
            self._stream = self._batches.train(epoch, 0)
        images, labels = next(self._stream)
        return images.contiguous(), labels

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Nothing is held out; per cent of the test images of all ranks."""
        model.eval()
        counts = torch.zeros(2, device=next(model.parameters()).device)
        for images, labels in self._batches.test():
            right = (model.module(images).argmax(1) == labels).sum()
            counts += torch.stack([right, right.new_tensor(len(labels))])
        dist.all_reduce(counts)
        model.train()
        return float("nan"), 100 * float(counts[0] / counts[1])


def open_data(setting: Setting, ranks: Ranks) -> Batches | Photographs:
    """Open the data set for one rank.

    Raises:
        RecipeError: if it does not lie where ``--data`` says.
    """
    batch = setting.batch * ranks.count
    if setting.dataset == "imagenet":
        return _photographs(setting, batch, ranks)
    folder = Path(setting.data) if setting.data else None
    images = open_images(setting.dataset, folder, hold_out=0)
    order = TrainOrder(len(images.train.labels), batch, ranks.rank, ranks.count, setting.seed)
    return Batches(images, order, _augmentation(setting, order))


def _photographs(setting: Setting, batch: int, ranks: Ranks) -> Photographs:
    if not setting.data:
        raise RecipeError("--data is not given: imagenet is read from there, never downloaded")
    options = Settings(
        dataset="imagenet", data_path=setting.data, batch_size=batch, seed=setting.seed
    )
    workers = threads_of(options, ranks)
    return Photographs(open_batches(options, ranks.rank, ranks.count, ranks.device, workers))


def _augmentation(setting: Setting, order: TrainOrder) -> Augmentation | None:
    if not (setting.shift or setting.mirror):
        return None
    facts = FACTS[setting.dataset]
    # Images are standardised before: what a shift brings in is the mean.
    preset = Preset(
        channels=facts.channels,
        size=facts.size,
        mean=(0.0,) * facts.channels,
        std=(1.0,) * facts.channels,
        shift=setting.shift,
        mirror=setting.mirror,
        photographs=False,
    )
    return Augmentation(preset, order)
