"""Read batches of one split: from memory, from image files, or from FFCV's ``.beton`` files.

A reader has ``samples``, ``classes``, ``reproducible`` (whether the images depend on the seed only,
bit for bit) and ``batches(rows, epoch)``, which yields uint8 images (N, H, W, C) and labels (N) for
each array of indices.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes.errors import RecipeError
from recipes.image_data.beton import check_beton, import_ffcv
from recipes.image_data.order import CROP, Indices, keyed_seed
from recipes.image_data.presets import Preset
from recipes.image_data.sources import Arrays, Photographs, decode_image, vision
from recipes.interruption import ignore_signals


class MemoryReader:
    reproducible = True

    def __init__(self, source: Arrays) -> None:
        self.samples, self.classes = len(source), source.classes
        self._images = torch.from_numpy(np.ascontiguousarray(source.images))
        self._labels = torch.from_numpy(source.labels)

    def batches(self, rows: list[Indices], epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for row in map(torch.from_numpy, rows):
            yield self._images[row], self._labels[row]


class FileReader:
    """Reads image files with PIL, torchvision and torch's DataLoader."""

    reproducible = True

    def __init__(
        self, source: Photographs, preset: Preset, *, train: bool, workers: int, seed: int
    ) -> None:
        self.samples, self.classes = len(source), source.classes
        self.source, self.preset, self.train, self.seed = source, preset, train, seed
        self.workers = workers

    def batches(self, rows: list[Indices], epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images and labels; raise RecipeError if an image cannot be decoded."""
        key = (self.seed, epoch) if self.train else None
        loader = DataLoader(
            _Crops(self.source, self.preset.size, self.preset.crop_ratio, key),
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


@dataclass(frozen=True)
class _Crops(Dataset[Any]):
    """Photographs cropped to one size: at random, by seed and epoch, or without a key centrally."""

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
        functional = vision().transforms.functional
        return functional.center_crop(
            functional.resize(image, round(self.size / self.ratio)), self.size
        )

    def _random(self, image: Any, key: tuple[int, int], index: int) -> Any:
        # torchvision's transforms draw from the global generator, so seed it for each image. The
        # crop then depends neither on the worker process nor on the images before it.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(keyed_seed(CROP, *key, index))
            return vision().transforms.RandomResizedCrop(self.size)(image)


def _collate(samples: list[Any]) -> tuple[Tensor, Tensor] | str:
    for sample in samples:
        if isinstance(sample, str):
            return sample
    images = torch.from_numpy(np.stack([image for image, _ in samples]))
    return images, torch.tensor([label for _, label in samples])


class FfcvReader:
    """Reads a ``.beton`` file with FFCV.

    FFCV's random crops are not reproducible: Numba's threads draw them, and their generators cannot
    be seeded from outside. Order and augmentation do not use FFCV's random numbers.
    """

    def __init__(self, path: Path, preset: Preset, *, train: bool, workers: int) -> None:
        check_beton(path)
        self.path, self.preset, self.train, self.workers = path, preset, train, workers
        file = import_ffcv("reader").Reader(str(path))
        self.samples = int(file.num_samples)
        self.classes = int(file.metadata["f1"].max()) + 1
        self.reproducible = not train
        # By batch size. A loader compiles its code at its first batch, which takes seconds.
        self._loaders: dict[int, Any] = {}

    def batches(self, rows: list[Indices], epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images and labels. FFCV reuses the memory: a batch is valid until the next one."""
        loader, threads = self._loader(len(rows[0])), torch.get_num_threads()
        loader.traversal_order.indices = np.concatenate(rows).astype(np.uint64)
        iterator = iter(loader)
        # iter() sets torch's number of threads to FFCV's number of workers.
        torch.set_num_threads(threads)
        try:
            for images, labels in iterator:
                yield images, labels.view(-1)
        finally:
            iterator.close()

    def _loader(self, batch_size: int) -> Any:
        if batch_size not in self._loaders:
            images, size = import_ffcv("fields.rgb_image"), (self.preset.size, self.preset.size)
            crop = images.CenterCropRGBImageDecoder(size, ratio=self.preset.crop_ratio)
            if self.train:
                crop = images.RandomResizedCropRGBImageDecoder(size)
            threads, to_tensor = torch.get_num_threads(), import_ffcv("transforms").ToTensor
            label = import_ffcv("fields.decoders").IntDecoder()
            self._loaders[batch_size] = import_ffcv("loader").Loader(
                str(self.path),
                batch_size=batch_size,
                num_workers=self.workers,
                seed=0,
                pipelines={"image": [crop, to_tensor()], "label": [label, to_tensor()]},
                drop_last=False,
            )
            # Set it here, because the constructor accepts only FFCV's own orders. The loader keeps
            # the length of the constructor's order, all samples, and no epoch has more.
            self._loaders[batch_size].traversal_order = _FixedOrder(np.arange(self.samples))
            torch.set_num_threads(threads)
        return self._loaders[batch_size]


class _FixedOrder:
    """An FFCV traversal order whose indices the reader sets before each epoch."""

    def __init__(self, indices: Any) -> None:
        self.indices = indices.astype(np.uint64)

    def sample_order(self, epoch: int) -> Any:
        return self.indices
