"""Small public data sets by name. All except the digits are read from a path."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from recipes.errors import RecipeError
from recipes.image_data.in_memory import require_path
from recipes.image_data.sources import Arrays, cifar10, digits
from torchcomp.advisor.torchvision_compat import import_torchvision


def read_public(name: str, path: Path | None) -> dict[str, Arrays]:
    """Return the arrays "train" and "test" of a data set. Nothing is downloaded.

    Args:
        name: one of :data:`PUBLIC`.
        path: the ``root`` folder of torchvision's data sets. For cifar10, the python archive or
            its unpacked folder. None for digits, which come with scikit-learn.

    Raises:
        RecipeError: if ``name`` is unknown or the data set is not found at ``path``.
    """
    if name not in PUBLIC:
        raise RecipeError(f"--dataset {name!r}: expected one of {', '.join(PUBLIC)}")
    if name == "digits":
        if path is not None:
            raise RecipeError(
                f"--data {path} is not used by --dataset digits, which comes with scikit-learn; "
                "leave out --data, or choose another --dataset"
            )
        return digits()
    advice = (
        f"--dataset {name} is read from it, nothing is downloaded; --dataset digits needs no path"
    )
    return _READERS[name](require_path(path, advice))


def _from_torchvision(kind: str) -> Callable[[Path], dict[str, Arrays]]:
    def read(folder: Path) -> dict[str, Arrays]:
        import_torchvision()
        from torchvision import datasets

        reader = getattr(datasets, kind)
        # SVHN is the one data set here with another argument for the split.
        options: dict[str, dict[str, Any]] = {
            name: {"split": name} if kind == "SVHN" else {"train": name == "train"}
            for name in ("train", "test")
        }
        try:
            return {n: _arrays(reader(str(folder), **chosen)) for n, chosen in options.items()}
        except RuntimeError as error:
            raise RecipeError(
                f"--data {folder}: torchvision does not find {kind} there ({error}); expected the "
                "folder that torchvision calls root"
            ) from None

    return read


def _arrays(images: Any) -> Arrays:
    # torchvision stores (N, H, W) for grey images, (N, 3, H, W) for SVHN, else (N, H, W, 3).
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
