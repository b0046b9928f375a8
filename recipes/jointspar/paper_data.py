"""The data of a run in the paper's setting: images in memory, or photographs."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.distributed import Worker, threads_per_worker
from recipes.errors import RecipeError
from recipes.image_data import Batches as PhotographBatches
from recipes.image_data import open_batches
from recipes.image_data.augment import Augmentation
from recipes.image_data.order import TrainOrder
from recipes.image_data.presets import Preset
from recipes.jointspar.image_sets import SIZES, Batches, open_images
from recipes.jointspar.paper_setting import Setting
from recipes.settings import Settings


class Photographs:
    """ImageNet, decoded on the fly. Each rank evaluates a part of the test images."""

    def __init__(self, batches: PhotographBatches) -> None:
        self._batches = batches
        self._stream: Iterator[tuple[Tensor, Tensor]] = iter(())

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole batches in an epoch."""
        return self._batches.order.steps_per_epoch

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's images and labels. Steps must be requested in order."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if index == 0:
            self._stream = self._batches.train(epoch, 0)
        images, labels = next(self._stream)
        return images.contiguous(), labels

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Return NaN, since nothing is held out, and the accuracy on all test images."""
        model.eval()
        counts = torch.zeros(2, device=next(model.parameters()).device)
        for images, labels in self._batches.test():
            right = (model.module(images).argmax(1) == labels).sum()
            counts += torch.stack([right, right.new_tensor(len(labels))])
        dist.all_reduce(counts)
        model.train()
        return float("nan"), 100 * float(counts[0] / counts[1])


def open_data(setting: Setting, worker: Worker) -> Batches | Photographs:
    """Open the data set for one rank.

    Raises:
        RecipeError: If the data set is not found in ``--data``.
    """
    batch = setting.batch * worker.world_size
    if setting.dataset == "imagenet":
        return _photographs(setting, batch, worker)
    folder = Path(setting.data) if setting.data else None
    images = open_images(setting.dataset, folder, hold_out=0)
    order = TrainOrder(
        len(images.train.labels), batch, worker.rank, worker.world_size, setting.seed
    )
    return Batches(images, order, _augmentation(setting, order))


def _photographs(setting: Setting, batch: int, worker: Worker) -> Photographs:
    if not setting.data:
        raise RecipeError(
            "--data is missing: name the folder of imagenet, which is never downloaded"
        )
    options = Settings(
        dataset="imagenet", data_path=setting.data, batch_size=batch, seed=setting.seed
    )
    workers = threads_per_worker(options, worker)
    return Photographs(
        open_batches(options, worker.rank, worker.world_size, worker.device, workers)
    )


def _augmentation(setting: Setting, order: TrainOrder) -> Augmentation | None:
    if not (setting.shift or setting.mirror):
        return None
    sizes = SIZES[setting.dataset]
    # The images are already standardised, so a mean of 0 fills shifted borders with the mean.
    preset = Preset(
        channels=sizes.channels,
        size=sizes.size,
        mean=(0.0,) * sizes.channels,
        std=(1.0,) * sizes.channels,
        shift=setting.shift,
        mirror=setting.mirror,
        photographs=False,
    )
    return Augmentation(preset, order)
