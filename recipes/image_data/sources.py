"""The data sets as stored on disk. Indexing one returns an image (H, W, C) and its label.

Nothing is ever downloaded.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from recipes.errors import RecipeError
from torchcomp.advisor.torchvision_compat import import_torchvision

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

SPLITS = ("train", "test")
# ImageNet's folders and FFCV's files are called "val", not "test".
FILE_WORDS = {"train": "train", "test": "val"}
# Other files in a class folder, such as thumbnails' databases, are ignored.
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
_TORCHVISION = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "svhn": "SVHN",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}
PUBLIC = ("digits", *_TORCHVISION)
"""Small data sets, which are read into memory."""


def vision() -> Any:
    torchvision = import_torchvision()
    for name in ("datasets", "transforms.functional"):
        importlib.import_module(f"torchvision.{name}")
    return torchvision


@dataclass(frozen=True)
class Arrays:
    """A small data set in memory: decoded images (N, H, W, C) and labels (N)."""

    images: Bytes
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1


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
    """Decode an image file as RGB; raise RecipeError if it is damaged or is not an image."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    # PIL raises SyntaxError for some broken PNG files.
    except (OSError, SyntaxError, ValueError) as error:
        raise RecipeError(
            f"cannot decode the image {path} ({error}); replace or delete it"
        ) from None


def read_public(name: str, path: Path | None) -> dict[str, Arrays]:
    """Return the arrays "train" and "test" of a small data set, one of :data:`PUBLIC`."""
    if name not in PUBLIC:
        raise RecipeError(f"--dataset {name!r}: expected one of {', '.join(PUBLIC)}")
    if name == "digits":
        if path is not None:
            raise RecipeError(
                f"{path} is not used by --dataset digits, which comes with scikit-learn: leave "
                "it out, or choose another --dataset"
            )
        return _digits()
    try:
        if path is None:
            raise FileNotFoundError("no path was given")
        return {split: _from_torchvision(name, path, split) for split in SPLITS}
    except (OSError, RuntimeError) as error:
        raise RecipeError(
            f"--dataset {name} is not found ({error}): name the folder that torchvision calls "
            "root, with the unpacked files; nothing is downloaded"
        ) from None


def _from_torchvision(name: str, path: Path, split: str) -> Arrays:
    reader = getattr(vision().datasets, _TORCHVISION[name])
    # SVHN is the one data set here with another argument for the split.
    chosen = {"split": split} if name == "svhn" else {"train": split == "train"}
    images = reader(str(path), **chosen)
    # torchvision stores (N, H, W) for grey images, (N, 3, H, W) for SVHN, else (N, H, W, 3).
    pixels = np.asarray(images.data)
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    elif pixels.shape[1] == 3:
        pixels = pixels.transpose(0, 2, 3, 1)
    labels = images.labels if hasattr(images, "labels") else images.targets
    return Arrays(pixels, np.asarray(labels, dtype=np.int64))


def _digits() -> dict[str, Arrays]:
    """Return scikit-learn's handwritten digits. Every fifth image of a class is a test image."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images, labels = bunch.images.astype(np.uint8)[..., None], bunch.target.astype(np.int64)
    # Per class, so that both splits have the same proportions.
    index_in_class = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        index_in_class[labels == label] = np.arange((labels == label).sum())
    test = index_in_class % 5 == 4
    chosen = {"train": ~test, "test": test}
    return {split: Arrays(images[rows], labels[rows]) for split, rows in chosen.items()}


def photographs(path: Path) -> dict[str, Photographs]:
    """Read an image folder of ImageNet's layout: ``train/CLASS/*.jpg``, ``val/CLASS/*.jpg``."""
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
