"""Read batches from ``.beton`` files with FFCV."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.image_data.beton import check_beton, import_ffcv
from recipes.image_data.order import Indices
from recipes.image_data.presets import Preset


class FfcvReader:
    """Reads batches of one split. The caller chooses the images of each batch.

    FFCV's random crops of photographs are not reproducible: Numba's threads draw them, and their
    generators cannot be seeded from outside. Digits and CIFAR-10 are stored at their final size,
    so FFCV does not crop them. Order and augmentation do not use FFCV's random numbers.

    Args:
        path: of the ``.beton`` file.
        preset: of the data set.
        train: whether to read training images, which are cropped at random.
        workers: number of FFCV's threads.

    Raises:
        RecipeError: if the file is missing or damaged.
    """

    def __init__(self, path: Path, preset: Preset, *, train: bool, workers: int) -> None:
        check_beton(path)
        import_ffcv()
        self.path, self.preset, self.train, self.workers = path, preset, train, workers
        file = importlib.import_module("ffcv.reader").Reader(str(path))
        self.samples = int(file.num_samples)
        self.classes = int(file.metadata["f1"].max()) + 1
        self.reproducible = not (train and preset.photographs)
        # By batch size. A loader compiles its code at its first batch, which takes seconds.
        self._loaders: dict[int, tuple[Any, _FixedOrder]] = {}

    def batches(self, rows: list[Indices], epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield uint8 images (N, H, W, C) and labels (N).

        FFCV reuses the memory, so a batch is valid until the next one is read.

        Args:
            rows: the indices of the images, one array per batch.
            epoch: unused. TorchvisionReader needs it for its random crops.
        """
        loader, order = self._loader(len(rows[0]))
        order.indices = np.concatenate(rows).astype(np.uint64)
        threads = torch.get_num_threads()
        iterator = iter(loader)
        # iter() sets torch's number of threads to FFCV's number of workers.
        torch.set_num_threads(threads)
        try:
            for images, labels in iterator:
                yield images, labels.view(-1)
        finally:
            iterator.close()

    def _loader(self, batch_size: int) -> tuple[Any, "_FixedOrder"]:
        if batch_size not in self._loaders:
            self._loaders[batch_size] = self._new_loader(batch_size)
        return self._loaders[batch_size]

    def _new_loader(self, batch_size: int) -> tuple[Any, "_FixedOrder"]:
        threads = torch.get_num_threads()
        order = _FixedOrder(np.arange(self.samples, dtype=np.uint64))
        to_tensor = importlib.import_module("ffcv.transforms").ToTensor
        labels = importlib.import_module("ffcv.fields.decoders").IntDecoder()
        loader = importlib.import_module("ffcv.loader").Loader(
            str(self.path),
            batch_size=batch_size,
            num_workers=self.workers,
            seed=0,
            pipelines={"image": [self._decoder(), to_tensor()], "label": [labels, to_tensor()]},
            drop_last=False,
        )
        # Set it here, because the constructor accepts only FFCV's own orders. The loader keeps the
        # length of the constructor's order, all samples, and no epoch has more.
        loader.traversal_order = order
        torch.set_num_threads(threads)
        return loader, order

    def _decoder(self) -> Any:
        if self.preset.channels == 1:
            return importlib.import_module("ffcv.fields.ndarray").NDArrayDecoder()
        images = importlib.import_module("ffcv.fields.rgb_image")
        size = (self.preset.size, self.preset.size)
        # CIFAR-10 is stored at its final size.
        if not self.preset.photographs:
            return images.SimpleRGBImageDecoder()
        if self.train:
            return images.RandomResizedCropRGBImageDecoder(size)
        return images.CenterCropRGBImageDecoder(size, ratio=self.preset.crop_ratio)


class _FixedOrder:
    """An FFCV traversal order whose indices the reader sets before each epoch."""

    def __init__(self, indices: Any) -> None:
        self.indices = indices

    def sample_order(self, epoch: int) -> Any:
        """Return the indices. FFCV's own count of epochs does not matter."""
        return self.indices
