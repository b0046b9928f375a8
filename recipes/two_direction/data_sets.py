"""Images as samples of a linear model, in n equal shards. Nothing is downloaded."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from recipes.errors import RecipeError
from recipes.image_data.sources import read_public

DATASETS = ("digits", "cifar10")
_BRIGHTEST = {"digits": 16.0, "cifar10": 255.0}  # of a pixel


@dataclass(frozen=True)
class Samples:
    """Features (N, f) in float64, with a column of ones, and labels (N) from 0."""

    name: str
    features: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]
    classes: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def d(self) -> int:
        """Number of coordinates of a linear model for these classes."""
        return int(self.features.shape[1]) * self.classes

    def shards(self, n: int, seed: int) -> list["Samples"]:
        """Shuffle the samples and cut them into ``n`` equal shards; drop up to n - 1 samples."""
        size = len(self) // n
        if not size:
            raise RecipeError(f"{len(self)} samples cannot be cut into {n} shards: choose fewer")
        order = np.random.default_rng(seed).permutation(len(self))
        rows = [order[i * size : (i + 1) * size] for i in range(n)]
        return [Samples(self.name, self.features[r], self.labels[r], self.classes) for r in rows]


def open_samples(dataset: str = "digits", path: Path | None = None) -> Samples:
    """Read a data set: all digits, or the training images of cifar10, which needs a path."""
    if dataset == "digits":
        if path is not None:
            raise RecipeError(f"--data {path}: --dataset digits needs no path; leave out --data")
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
    else:
        train = read_public(dataset, path)["train"]
        pixels, labels = train.images.reshape(len(train), -1), train.labels
    features = np.hstack([pixels / _BRIGHTEST[dataset], np.ones((len(pixels), 1))])
    return Samples(dataset, features, labels.astype(np.int64), 10)
