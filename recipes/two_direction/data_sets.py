"""Data sets, in n equal shards. Nothing is downloaded."""

import bz2
import itertools
import math
import reprlib
import tarfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from recipes.errors import RecipeError
from recipes.image_data.in_memory import require_path
from recipes.image_data.sources import cifar10

REAL_SIM_FEATURES = 20_958
REAL_SIM_SAMPLES = 72_309
_REAL_SIM_ENTRIES = 51
_DIGITS_MOST = 16.0
_CIFAR_MOST = 255.0
# LIBSVM stores an index in 32 bits.
_HIGHEST_INDEX = 2**31 - 1


@dataclass(frozen=True)
class Samples:
    """Features (N, f) in float64, dense or CSR, with a column of ones, and labels (N)."""

    name: str
    features: Any
    labels: npt.NDArray[np.int64]
    classes: int

    def __post_init__(self) -> None:
        rows = self.features.shape[0]
        if len(self.labels) != rows:
            raise RecipeError(
                f"{self.name} has {len(self.labels)} labels for {rows} samples, expected as many"
            )
        strange = [int(x) for x in np.unique(self.labels) if not 0 <= x < self.classes]
        if strange:
            raise RecipeError(
                f"{self.name} has the labels {strange}, expected labels from 0 to "
                f"{self.classes - 1} for its {self.classes} classes"
            )

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
    """Read a data set; cifar10 and real-sim need a path, and the others refuse one.

    Raises:
        RecipeError: if ``path`` does not have the data set, or the data set needs no path.
    """
    if dataset in _WITHOUT_PATH:
        if path is not None:
            raise RecipeError(
                f"--data {path}: --dataset {dataset} needs no path; leave out --data, or choose "
                "the data set of that path with --dataset"
            )
        return _WITHOUT_PATH[dataset]()
    there = require_path(
        path,
        f"{dataset} is read from there, and nothing is downloaded; --dataset digits and "
        "--dataset synthetic need no path",
    )
    return cifar(there) if dataset == "cifar10" else libsvm(there, REAL_SIM_FEATURES)


def digits() -> Samples:
    """Return scikit-learn's digits: 1,797 images of 64 pixels, divided by 16."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return _dense("digits", pixels / _DIGITS_MOST, labels, 10)


def cifar(path: Path) -> Samples:
    """Return CIFAR-10's training images from its python archive or folder, divided by 255."""
    try:
        train = cifar10(path)["train"]
    except (tarfile.TarError, OSError, EOFError, KeyError, ValueError) as error:
        raise RecipeError(
            f"{path} cannot be read as CIFAR-10's python archive, the .tar.gz or its folder "
            f"cifar-10-batches-py: {error!r}"
        ) from None
    pixels = train.images.reshape(len(train.images), -1) / _CIFAR_MOST
    return _dense("cifar10", pixels, train.labels, 10)


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
    """Read a file in LIBSVM's format, plain or compressed as .bz2.

    A line is ``label index:value index:value ...``; indices count from 1 and ascend. Labels can
    be any numbers. Classes are numbered in ascending order of the labels.

    Args:
        path: the file.
        features: number of features; by default the highest index, which is below 2^31.

    Raises:
        RecipeError: if a line has another form. The message names the file and the line.
    """
    labels, values = array("d"), array("d")
    columns, ends = array("q"), array("q", [0])
    for location, line in _lines(path):
        label, entries = _parsed(line, location, _HIGHEST_INDEX if features is None else features)
        labels.append(label)
        columns.extend(index - 1 for index, _ in entries)
        values.extend(value for _, value in entries)
        ends.append(len(columns))
    if not labels:
        raise RecipeError(f"{path} has no samples: expected lines such as '+1 3:0.5 17:1.2'")
    width = features if features is not None else max(columns, default=-1) + 1
    parts = (np.asarray(values), np.asarray(columns), np.asarray(ends))
    matrix = sparse.csr_matrix(parts, shape=(len(labels), width))
    known, numbered = np.unique(labels, return_inverse=True)
    if len(known) < 2:
        raise RecipeError(f"{path}: every label is {known[0]:g}, expected at least two classes")
    return _sparse(path.stem, matrix, numbered.astype(np.int64), len(known))


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                text = line.partition("#")[0].strip()
                if text:
                    yield f"{path}, line {number}", text
    except (OSError, EOFError) as error:
        # An archive is unpacked block by block, so the damage is somewhere after these lines.
        extent = f"beyond its first {number:,} lines" if number else "at all"
        raise RecipeError(f"{path} cannot be read {extent}: {error}") from None


def _opened(path: Path) -> IO[str]:
    # Bytes that are not ASCII become a character that the parser refuses, with the line number.
    opener = bz2.open if path.suffix == ".bz2" else open
    return opener(path, "rt", encoding="ascii", errors="replace")


def _parsed(line: str, location: str, features: int) -> tuple[float, list[tuple[int, float]]]:
    label, *words = line.split()
    entries = [_entry(word, location) for word in words]
    indices = [index for index, _ in entries]
    for before, index in itertools.pairwise(indices):
        if index <= before:
            raise RecipeError(f"{location}: indices must ascend, but {index} follows {before}")
    if indices and indices[0] < 1:
        raise RecipeError(f"{location}: index {indices[0]}, but indices count from 1")
    if indices and indices[-1] > features:
        raise RecipeError(
            f"{location}: index {indices[-1]}, but {features} is the highest possible"
        )
    return _finite(label, "the label", location), entries


def _entry(word: str, location: str) -> tuple[int, float]:
    index, colon, value = word.partition(":")
    # A longer number is above any limit, and Python refuses to convert thousands of digits.
    if not colon or not index.isdecimal() or len(index) > len(str(_HIGHEST_INDEX)):
        raise RecipeError(
            f"{location}: {reprlib.repr(word)} is not index:value, such as 17:0.5, with an "
            "index below 2^31"
        )
    return int(index), _finite(value, f"the value of feature {index}", location)


def _finite(word: str, what: str, location: str) -> float:
    try:
        # float() accepts 1_000, which is not a number in this format.
        number = math.nan if "_" in word else float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise RecipeError(f"{location}: {what} must be a finite number, not {reprlib.repr(word)}")
    return number


def _dense(name: str, features: Any, labels: Any, classes: int) -> Samples:
    ones = np.ones((len(features), 1))
    return Samples(name, np.hstack([features, ones]), labels.astype(np.int64), classes)


def _sparse(name: str, features: Any, labels: Any, classes: int) -> Samples:
    ones = np.ones((features.shape[0], 1))
    return Samples(name, sparse.hstack([features, ones], format="csr"), labels, classes)


_WITHOUT_PATH = {"digits": digits, "synthetic": synthetic}
DATASETS = (*_WITHOUT_PATH, "cifar10", "real-sim")
