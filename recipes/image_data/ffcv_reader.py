"""Batches read from ``.beton`` files by FFCV."""

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
    """Reads any batches of one split, given the images of each.

    What FFCV decides at random is drawn by Numba's threads, whose generators cannot be seeded
    from outside: the crops of photographs differ from run to run. Images stored at their final
    size (digits, CIFAR-10) are read as they are, and everything else (order, mirroring) is ours,
    so there the same seed gives the same batches.
    """

    def __init__(self, path: Path, preset: Preset, *, train: bool, workers: int) -> None:
        check_beton(path)
        import_ffcv()
        self.path, self.preset, self.train, self.workers = path, preset, train, workers
        file = importlib.import_module("ffcv.reader").Reader(str(path))
        self.samples = int(file.num_samples)
        self.classes = int(file.metadata["f1"].max()) + 1
        self.reproducible = not (train and preset.photographs)
        self._grey = preset.channels == 1
        self._loaders: dict[int, tuple[Any, _GivenOrder]] = {}

    def batches(self, rows: list[Indices], epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images (N, H, W, C) as bytes and labels (N); they last until the next batch."""
        loader, order = self._loader(len(rows[0]))
        order.indices = np.concatenate(rows).astype(np.uint64)
        threads = torch.get_num_threads()
        iterator = iter(loader)
        # FFCV sets torch's threads to its own number of workers at the start of every epoch.
        torch.set_num_threads(threads)
        try:
            for images, labels in iterator:
                yield images, labels.view(-1)
        finally:
            iterator.close()

    def _loader(self, batch_size: int) -> tuple[Any, "_GivenOrder"]:
        if batch_size not in self._loaders:
            self._loaders[batch_size] = self._new_loader(batch_size)
        return self._loaders[batch_size]

    def _new_loader(self, batch_size: int) -> tuple[Any, "_GivenOrder"]:
        threads = torch.get_num_threads()
        order = _GivenOrder(np.arange(self.samples, dtype=np.uint64))
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
        # The constructor cannot take an order that is not FFCV's own, and its length is what the
        # order has at this moment: the whole set, of which an epoch may later want a part.
        loader.traversal_order = order
        torch.set_num_threads(threads)
        return loader, order

    def _decoder(self) -> Any:
        if self._grey:
            return importlib.import_module("ffcv.fields.ndarray").NDArrayDecoder()
        images = importlib.import_module("ffcv.fields.rgb_image")
        size = (self.preset.size, self.preset.size)
        if not self.preset.photographs:
            return images.SimpleRGBImageDecoder()
        if self.train:
            return images.RandomResizedCropRGBImageDecoder(size)
        return images.CenterCropRGBImageDecoder(size, ratio=self.preset.crop_ratio)


class _GivenOrder:
    """FFCV's traversal order, as far as its loader uses it: the images of an epoch, in order."""

    def __init__(self, indices: Any) -> None:
        self.indices = indices

    def sample_order(self, epoch: int) -> Any:
        """Return the images of the epoch; which epoch it is the caller has already said."""
        return self.indices
