"""Read batches from the original files with PIL, torchvision and torch's DataLoader."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes.errors import RecipeError
from recipes.image_data.order import CROP, Indices, keyed_seed
from recipes.image_data.presets import Preset
from recipes.image_data.sources import Arrays, Photographs, decode_image
from recipes.interruption import ignore_signals
from torchcomp.advisor.torchvision_compat import import_torchvision


class TorchvisionReader:
    """Reads batches of one split. The caller chooses the images of each batch.

    Args:
        source: the images and labels.
        preset: of the data set.
        train: whether to read training images, which are cropped at random.
        workers: number of loader processes, for photographs.
        seed: of the random crops.

    Attributes:
        reproducible: True, because the crops depend on the seed only.
    """

    reproducible = True

    def __init__(
        self, source: Arrays | Photographs, preset: Preset, *, train: bool, workers: int, seed: int
    ) -> None:
        self.samples, self.classes = len(source), source.classes
        self.source, self.preset, self.train, self.seed = source, preset, train, seed
        # Copying images in memory is faster than receiving them from another process.
        self.workers = workers if preset.photographs else 0

    def batches(self, rows: list[Indices], epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield uint8 images (N, H, W, C) and labels (N).

        Args:
            rows: the indices of the images, one array per batch.
            epoch: the random crops depend on it.

        Raises:
            RecipeError: if an image cannot be decoded.
        """
        loader = DataLoader(
            self._dataset(epoch),
            batch_sampler=[row.tolist() for row in rows],
            num_workers=self.workers,
            collate_fn=_collate,
            # Schedulers signal all processes. The rank needs its workers until it has saved.
            worker_init_fn=ignore_signals,
            # The loader draws a seed in every iter(). By default it would use the global generator,
            # whose state is in the checkpoint.
            generator=torch.Generator(),
        )
        for batch in loader:
            if isinstance(batch, str):
                raise RecipeError(batch)
            yield batch

    def _dataset(self, epoch: int) -> Any:
        if isinstance(self.source, Arrays):
            return self.source
        key = (self.seed, epoch) if self.train else None
        return _Crops(self.source, self.preset.size, self.preset.crop_ratio, key)


@dataclass(frozen=True)
class _Crops(Dataset[Any]):
    """Photographs cropped to one size.

    Attributes:
        source: the photographs.
        size: height and width of a crop in pixels.
        ratio: share of the shorter side that a centre crop keeps.
        key: seed and epoch of random crops; None for centre crops.
    """

    source: Photographs
    size: int
    ratio: float
    key: tuple[int, int] | None

    def __getitem__(self, index: int) -> tuple[Any, int] | str:
        try:
            image = decode_image(self.source.paths[index])
        except RecipeError as error:
            # Not raised here: DataLoader would put the worker's traceback into the message.
            return str(error)
        crop = self._centre(image) if self.key is None else self._random(image, self.key, index)
        return np.array(crop), self.source.labels[index]

    def _centre(self, image: Any) -> Any:
        import_torchvision()
        from torchvision.transforms import functional

        resized = functional.resize(image, round(self.size / self.ratio))
        return functional.center_crop(resized, self.size)

    def _random(self, image: Any, key: tuple[int, int], index: int) -> Any:
        import_torchvision()
        from torchvision.transforms import RandomResizedCrop

        # torchvision's transforms draw from the global generator, so seed it for each image. The
        # crop then depends neither on the worker process nor on the images before it.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(keyed_seed(CROP, *key, index))
            return RandomResizedCrop(self.size)(image)


def _collate(samples: list[Any]) -> tuple[Tensor, Tensor] | str:
    unreadable = [sample for sample in samples if isinstance(sample, str)]
    if unreadable:
        return str(unreadable[0])
    images = torch.from_numpy(np.stack([image for image, _ in samples]))
    return images, torch.tensor([label for _, label in samples])
