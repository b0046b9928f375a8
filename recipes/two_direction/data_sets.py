"""What the experiments train on: samples in n equal shards; nothing is ever downloaded."""

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
# LIBSVM itself holds an index in 32 bits.
_HIGHEST_INDEX = 2**31 - 1


@dataclass(frozen=True)
class Samples:
    """Samples with a column of ones: features (N, f), dense or CSR, float64, and labels (N)."""

    name: str
    features: Any
    labels: npt.NDArray[np.int64]
    classes: int

    def __post_init__(self) -> None:
        rows = self.features.shape[0]
        if len(self.labels) != rows:
            raise RecipeError(
                f"{self.name} has {len(self.labels)} labels for {rows} samples: some are missing"
            )
        strange = [int(x) for x in np.unique(self.labels) if not 0 <= x < self.classes]
        if strange:
            raise RecipeError(
                f"{self.name} has the labels {strange}, and its {self.classes} classes are counted "
                "from 0"
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def d(self) -> int:
        """Number of coordinates of a linear model of these classes."""
        return int(self.features.shape[1]) * self.classes

    def shards(self, n: int, seed: int) -> list["Samples"]:
        """Shuffle, and cut into ``n`` shards of one size; up to n - 1 samples are left over."""
        size = len(self) // n
        if not size:
            raise RecipeError(f"{len(self)} samples cannot be cut into {n} shards: n is too large")
        order = np.random.default_rng(seed).permutation(len(self))
        rows = [order[i * size : (i + 1) * size] for i in range(n)]
        return [Samples(self.name, self.features[r], self.labels[r], self.classes) for r in rows]


def open_samples(dataset: str, path: Path | None = None) -> Samples:
    """Read a data set; cifar10 and real-sim are read from ``path``, and the others from nowhere.

    Raises:
        RecipeError: if the data set does not lie there, or is to lie anywhere without need.
    """
    if dataset in _MADE_HERE:
        if path is not None:
            raise RecipeError(
                f"--data {path}: --dataset {dataset} reads nothing from there; leave out --data, "
                "or name the data set that lies there"
            )
        return _MADE_HERE[dataset]()
    there = require_path(
        path,
        f"{dataset} is read from there, and nothing is downloaded; --dataset digits and "
        "--dataset synthetic need no path",
    )
    return cifar(there) if dataset == "cifar10" else libsvm(there, REAL_SIM_FEATURES)


def digits() -> Samples:
    """scikit-learn's digits: 1,797 images of 64 pixels, divided by 16."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return _dense("digits", pixels / _DIGITS_MOST, labels, 10)


def cifar(path: Path) -> Samples:
    """CIFAR-10's training images from its python archive or folder, divided by 255."""
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
    """Two classes in documents of real-sim's number and size, with words of Zipf's frequencies.

    A hyperplane of normal weights tells the classes apart, but for the tenth of the labels that
    are turned over.
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
    """Read a file of LIBSVM's format, also one compressed as .bz2.

    A line is ``label index:value index:value ...``; indices count from 1 and ascend. Labels may be
    any numbers; classes are numbered in their order.

    Args:
        path: the file.
        features: how many there are; by default the highest index, of 2^31 - 1 at most.

    Raises:
        RecipeError: naming the file and the line, if one is not as above.
    """
    labels, values = array("d"), array("d")
    columns, ends = array("q"), array("q", [0])
    for place, line in _lines(path):
        label, entries = _parsed(line, place, _HIGHEST_INDEX if features is None else features)
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
        raise RecipeError(f"{path}: every label is {known[0]:g}, and it takes two to tell apart")
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
        # An archive is unpacked block by block: the damage lies in what follows these lines.
        place = f"beyond its first {number:,} lines" if number else "at all"
        raise RecipeError(f"{path} cannot be read {place}: {error}") from None


def _opened(path: Path) -> IO[str]:
    # What is no text at all becomes a word that the parser refuses, with its line.
    opener = bz2.open if path.suffix == ".bz2" else open
    return opener(path, "rt", encoding="ascii", errors="replace")


def _parsed(line: str, place: str, features: int) -> tuple[float, list[tuple[int, float]]]:
    label, *words = line.split()
    entries = [_entry(word, place) for word in words]
    indices = [index for index, _ in entries]
    for before, index in itertools.pairwise(indices):
        if index <= before:
            raise RecipeError(f"{place}: indices must ascend, and {index} follows {before}")
    if indices and indices[0] < 1:
        raise RecipeError(f"{place}: index {indices[0]}, but indices count from 1")
    if indices and indices[-1] > features:
        raise RecipeError(f"{place}: index {indices[-1]}, but {features} is the highest possible")
    return _finite(label, "the label", place), entries


def _entry(word: str, place: str) -> tuple[int, float]:
    index, colon, value = word.partition(":")
    # A longer one is above any limit, and Python need not convert it.
    if not colon or not index.isdecimal() or len(index) > len(str(_HIGHEST_INDEX)):
        raise RecipeError(
            f"{place}: {reprlib.repr(word)} is not index:value, such as 17:0.5, with an "
            "index below 2^31"
        )
    return int(index), _finite(value, f"the value of feature {index}", place)


def _finite(word: str, what: str, place: str) -> float:
    try:
        # Python would read 1_000 as a number.
        number = math.nan if "_" in word else float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise RecipeError(f"{place}: {what} must be a finite number, not {reprlib.repr(word)}")
    return number


def _dense(name: str, features: Any, labels: Any, classes: int) -> Samples:
    ones = np.ones((len(features), 1))
    return Samples(name, np.hstack([features, ones]), labels.astype(np.int64), classes)


def _sparse(name: str, features: Any, labels: Any, classes: int) -> Samples:
    ones = np.ones((features.shape[0], 1))
    return Samples(name, sparse.hstack([features, ones], format="csr"), labels, classes)


_MADE_HERE = {"digits": digits, "synthetic": synthetic}
DATASETS = (*_MADE_HERE, "cifar10", "real-sim")
