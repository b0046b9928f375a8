"""Data sets, in n equal shards. Nothing is downloaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from recipes.errors import RecipeError
from recipes.image_data.sources import read_public

REAL_SIM_FEATURES = 20_958
REAL_SIM_SAMPLES = 72_309
_REAL_SIM_ENTRIES = 51
_MOST = {"digits": 16.0, "cifar10": 255.0}  # of a pixel
DATASETS = ("digits", "synthetic", "cifar10", "real-sim")


@dataclass(frozen=True)
class Samples:
    """Features (N, f) in float64, dense or CSR, with a column of ones, and labels (N) from 0."""

    name: str
    features: Any
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


def open_samples(dataset: str, path: Path | None = None) -> Samples:
    """Read a data set; cifar10 and real-sim need a path, and the others refuse one."""
    if dataset in ("digits", "synthetic") and path is not None:
        raise RecipeError(
            f"--data {path}: --dataset {dataset} needs no path; leave out --data, or choose the "
            "data set of that path with --dataset"
        )
    if dataset == "synthetic":
        return synthetic()
    if dataset == "real-sim":
        if path is None or not path.is_file():
            raise RecipeError(
                f"--data {path}: --dataset real-sim needs its LIBSVM file, plain or .bz2; nothing "
                "is downloaded"
            )
        return libsvm(path, REAL_SIM_FEATURES)
    return digits() if dataset == "digits" else _images("cifar10", read_public("cifar10", path))


def digits() -> Samples:
    """Return scikit-learn's digits: 1,797 images of 64 pixels, divided by 16."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return _dense("digits", pixels / _MOST["digits"], labels, 10)


def _images(name: str, arrays: Any) -> Samples:
    train = arrays["train"]
    return _dense(name, train.images.reshape(len(train), -1) / _MOST[name], train.labels, 10)


def synthetic(
    samples: int = REAL_SIM_SAMPLES, features: int = REAL_SIM_FEATURES, seed: int = 0
) -> Samples:
    """Return made-up documents of two classes, with real-sim's shape and Zipf's word frequencies.

    A hyperplane with normal weights separates the classes. A tenth of the labels is then flipped.
    """
    rng = np.random.default_rng(seed)
    frequency = 1.0 / np.arange(1, features + 1)
    words = rng.choice(features, (samples, _REAL_SIM_ENTRIES), p=frequency / frequency.sum())
    rows = np.repeat(np.arange(samples), _REAL_SIM_ENTRIES)
    weights = rng.exponential(size=rows.size)
    matrix = sparse.csr_matrix((weights, (rows, words.ravel())), shape=(samples, features))
    lengths = np.sqrt(matrix.multiply(matrix).sum(1)).A1
    matrix = sparse.diags(1.0 / lengths) @ matrix
    scores = matrix @ rng.standard_normal(features)
    labels = (scores > np.median(scores)) ^ (rng.random(samples) < 0.1)
    return _sparse("synthetic", matrix, labels.astype(np.int64), 2)


def libsvm(path: Path, features: int | None = None) -> Samples:
    """Read a file in LIBSVM's format. Classes are numbered in ascending order of the labels."""
    from sklearn.datasets import load_svmlight_file

    try:
        matrix, labels = load_svmlight_file(str(path), n_features=features, zero_based=False)
    except (OSError, EOFError, ValueError) as error:
        raise RecipeError(
            f"{path} cannot be read as a LIBSVM file ({error}): expected lines such as "
            "'+1 3:0.5 17:1.2' with indices from 1"
        ) from None
    known, numbered = np.unique(labels, return_inverse=True)
    if len(known) < 2 or not np.isfinite(matrix.data).all():
        raise RecipeError(f"{path}: expected finite values, and labels of at least two classes")
    return _sparse(path.stem, matrix, numbered.astype(np.int64), len(known))


def _dense(name: str, features: Any, labels: Any, classes: int) -> Samples:
    ones = np.ones((len(features), 1))
    return Samples(name, np.hstack([features, ones]), labels.astype(np.int64), classes)


def _sparse(name: str, features: Any, labels: Any, classes: int) -> Samples:
    ones = np.ones((features.shape[0], 1))
    return Samples(name, sparse.hstack([features, ones], format="csr"), labels, classes)
