"""Small public data sets by their names, as arrays; all but the digits are read from a path."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from recipes.errors import RecipeError
from recipes.image_data.in_memory import existing
from recipes.image_data.sources import Arrays, cifar10, digits
from recipes.torchvision_compat import import_torchvision


def read_public(name: str, path: Path | None) -> dict[str, Arrays]:
    """Return a data set's "train" and "test"; nothing is ever downloaded.

    Args:
        name: one of :data:`PUBLIC`.
        path: where it lies: the folder that torchvision keeps its data sets in, or for cifar10 its
            python archive, or the folder that it unpacks to; None for digits, which is embedded.

    Raises:
        RecipeError: if the data set is unknown, does not lie there, or lies nowhere.
    """
    if name not in PUBLIC:
        raise RecipeError(f"--dataset {name!r}: expected one of {', '.join(PUBLIC)}")
    if name == "digits":
        if path is not None:
            raise RecipeError(
                f"--data {path}: --dataset digits is embedded, and nothing of it is read from "
                "there; leave out --data, or name the data set that lies there"
            )
        return digits()
    needs = f"{name} is read from there, and nothing is downloaded; --dataset digits needs no path"
    return _READERS[name](existing(path, needs))


def _from_torchvision(kind: str) -> Callable[[Path], dict[str, Arrays]]:
    def read(folder: Path) -> dict[str, Arrays]:
        import_torchvision()
        from torchvision import datasets

        reader = getattr(datasets, kind)
        options: dict[str, dict[str, Any]] = {
            name: {"split": name} if kind == "SVHN" else {"train": name == "train"}
            for name in ("train", "test")
        }
        try:
            return {n: _arrays(reader(str(folder), **chosen)) for n, chosen in options.items()}
        except RuntimeError as error:
            raise RecipeError(
                f"--data {folder}: torchvision finds no {kind} there, in the files and folders "
                f"that it keeps it in ({error})"
            ) from None

    return read


def _arrays(images: Any) -> Arrays:
    pixels = np.asarray(images.data)
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    elif pixels.shape[1] == 3:
        pixels = pixels.transpose(0, 2, 3, 1)
    labels = images.labels if hasattr(images, "labels") else images.targets
    return Arrays(pixels, np.asarray(labels, dtype=np.int64))


_READERS: dict[str, Callable[[Path], dict[str, Arrays]]] = {
    "mnist": _from_torchvision("MNIST"),
    "fashion-mnist": _from_torchvision("FashionMNIST"),
    "svhn": _from_torchvision("SVHN"),
    "cifar10": cifar10,
    "cifar100": _from_torchvision("CIFAR100"),
}
PUBLIC = ("digits", *_READERS)
