"""Batches read from the original files by PIL, torchvision's transforms and torch's loader."""

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
from recipes.image_data.sources import Arrays, Photographs, decoded
from recipes.torchvision_compat import import_torchvision


class TorchvisionReader:
    """Reads any batches of one split, given the images of each; the same seed, the same bytes."""

    reproducible = True

    def __init__(
        self, source: Arrays | Photographs, preset: Preset, *, train: bool, workers: int, seed: int
    ) -> None:
        self.samples, self.classes = len(source), source.classes
        self.source, self.preset, self.train, self.seed = source, preset, train, seed
        # Images in memory are copied faster than they could be sent from another process.
        self.workers = workers if preset.photographs else 0

    def batches(self, rows: list[Indices], epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images (N, H, W, C) as bytes and labels (N)."""
        loader = DataLoader(
            self._dataset(epoch),
            batch_sampler=[row.tolist() for row in rows],
            num_workers=self.workers,
            collate_fn=_collated,
            # The loader draws a number at every start: not from the generator that we checkpoint.
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
    """Photographs cut to one size: a random crop keyed by (seed, epoch, image), or the centre."""

    source: Photographs
    size: int
    ratio: float
    key: tuple[int, int] | None

    def __getitem__(self, index: int) -> tuple[Any, int] | str:
        try:
            image = decoded(self.source.paths[index])
        except RecipeError as error:
            # As text, since an exception leaves a worker process wrapped in its traceback.
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

        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(keyed_seed(CROP, *key, index))
            return RandomResizedCrop(self.size)(image)


def _collated(samples: list[Any]) -> tuple[Tensor, Tensor] | str:
    unreadable = [sample for sample in samples if isinstance(sample, str)]
    if unreadable:
        return str(unreadable[0])
    images = torch.from_numpy(np.stack([image for image, _ in samples]))
    return images, torch.tensor([label for _, label in samples])
