"""The data sets as stored on disk. Indexing one returns an image (H, W, C) and its label."""

import hashlib
import io
import pickle
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from recipes.errors import RecipeError

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

SPLITS = ("train", "test")
_CIFAR_BYTES = 3 * 32 * 32
_CIFAR_FILES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
# ImageNet's folders and FFCV's files are called "val", not "test".
FILE_WORDS = {"train": "train", "test": "val"}
# Other files in a class folder, such as thumbnails' databases, are ignored.
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}


@dataclass(frozen=True)
class Arrays:
    """A small data set in memory: decoded images (N, H, W, C) and labels (N)."""

    images: Bytes
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Bytes, int]:
        return self.images[index], int(self.labels[index])

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.labels.max()) + 1

    def fingerprint(self) -> str:
        """Return a hash of all images and labels."""
        digest = hashlib.sha256(str(self.images.shape).encode())
        digest.update(np.ascontiguousarray(self.images))
        digest.update(np.ascontiguousarray(self.labels))
        return digest.hexdigest()


@dataclass(frozen=True)
class Photographs:
    """An image folder with one sub-folder per class. Images are decoded when they are read."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: int

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Bytes, int]:
        return np.asarray(decode_image(self.paths[index])), self.labels[index]


def decode_image(path: Path) -> Image.Image:
    """Decode an image file as RGB.

    Raises:
        RecipeError: if the file is damaged or is not an image.
    """
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    # PIL raises SyntaxError for some broken PNG files.
    except (OSError, SyntaxError, ValueError) as error:
        raise RecipeError(
            f"cannot decode the image {path} ({error}); replace or delete it"
        ) from None


def digits() -> dict[str, Arrays]:
    """Return scikit-learn's handwritten digits. Every fifth image of a class is a test image."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = bunch.images.astype(np.uint8)[..., None]
    labels = bunch.target.astype(np.int64)
    # Per class, so that both splits have the same proportions.
    index_in_class = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        index_in_class[labels == label] = np.arange((labels == label).sum())
    test = index_in_class % 5 == 4
    return {
        split: Arrays(images[chosen], labels[chosen])
        for split, chosen in (("train", ~test), ("test", test))
    }


def cifar10(path: Path) -> dict[str, Arrays]:
    """Read CIFAR-10's python archive: the ``.tar.gz``, its unpacked folder, or the parent of it.

    Raises:
        RecipeError: if a file is missing or damaged.
    """
    batches = dict(_cifar_batches(path))
    missing = [n for names in _CIFAR_FILES.values() for n in names if n not in batches]
    if missing:
        raise RecipeError(
            f"{path} has no {', '.join(missing)}; expected CIFAR-10's python archive, the .tar.gz "
            "or its folder cifar-10-batches-py"
        )
    return {
        split: _concatenate([batches[n] for n in names]) for split, names in _CIFAR_FILES.items()
    }


def _cifar_batches(path: Path) -> Iterator[tuple[str, dict[bytes, Any]]]:
    wanted = {name for names in _CIFAR_FILES.values() for name in names}
    if path.is_file():
        # Read from the archive without unpacking it to disk.
        with tarfile.open(path) as archive:
            for member in archive:
                stream = archive.extractfile(member)
                if Path(member.name).name in wanted and stream is not None:
                    yield Path(member.name).name, _unpickle(stream.read(), member.name)
        return
    folder = path / "cifar-10-batches-py"
    for file in (folder if folder.is_dir() else path).glob("*_batch*"):
        if file.name in wanted:
            yield file.name, _unpickle(file.read_bytes(), str(file))


class _ArraysOnly(pickle.Unpickler):
    """Unpickles NumPy arrays only, so that a manipulated archive cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        # Python 3 pickles bytes through _codecs.encode if the protocol is 2, as in the archive.
        if module.split(".")[0] == "numpy" or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"unexpected {module}.{name}")


def _unpickle(content: bytes, name: str) -> dict[bytes, Any]:
    try:
        batch: dict[bytes, Any] = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, ValueError) as error:
        raise RecipeError(
            f"{name} is damaged ({error}); download the CIFAR-10 archive again"
        ) from None
    if missing := [key.decode() for key in (b"data", b"labels") if key not in batch]:
        raise RecipeError(f"{name} has no {' and '.join(missing)}; expected a batch of CIFAR-10")
    _check_batch(np.asarray(batch[b"data"]), np.asarray(batch[b"labels"]), name)
    return batch


def _check_batch(pixels: npt.NDArray[Any], labels: npt.NDArray[Any], name: str) -> None:
    if pixels.dtype != np.uint8 or pixels.shape[1:] != (_CIFAR_BYTES,):
        raise RecipeError(
            f"{name}: expected data of shape (N, {_CIFAR_BYTES}) and type uint8, found "
            f"{pixels.shape} and {pixels.dtype}"
        )
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise RecipeError(
            f"{name}: expected labels of shape (N,) and an integer type, found {labels.shape} and "
            f"{labels.dtype}"
        )


def _concatenate(batches: list[dict[bytes, Any]]) -> Arrays:
    # The archive stores the red plane of an image, then green, then blue.
    planes = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([np.asarray(batch[b"labels"]) for batch in batches])
    return Arrays(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels.astype(np.int64))


def photographs(path: Path) -> dict[str, Photographs]:
    """Read an image folder with ImageNet's layout, ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``.

    Raises:
        RecipeError: if a folder is missing or empty, or if the splits have different classes.
    """
    classes = {split: _class_names(path / FILE_WORDS[split]) for split in SPLITS}
    differing = sorted(set(classes["train"]) ^ set(classes["test"]))
    if differing:
        raise RecipeError(
            f"{path}: train/ and val/ must have the same class folders, but only one of them has "
            f"{', '.join(differing[:5])}{', ...' if len(differing) > 5 else ''}"
        )
    return {split: _list_images(path / FILE_WORDS[split], classes["train"]) for split in SPLITS}


def _class_names(folder: Path) -> list[str]:
    # Sorted, so that a class has the same label on all ranks and machines.
    names = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    if not names:
        raise RecipeError(
            f"{folder} has no class folders; expected one sub-folder per class, with its images"
        )
    return names


def _list_images(folder: Path, names: list[str]) -> Photographs:
    found = [
        (file, label)
        for label, name in enumerate(names)
        # Sorted for the same reason: an index must mean the same file everywhere.
        for file in sorted((folder / name).rglob("*"))
        if file.suffix.lower() in _SUFFIXES
    ]
    if not found:
        raise RecipeError(
            f"{folder} has no images; expected {', '.join(sorted(_SUFFIXES))} in its class folders"
        )
    return Photographs(tuple(f for f, _ in found), tuple(n for _, n in found), len(names))
