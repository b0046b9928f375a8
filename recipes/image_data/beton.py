"""FFCV's ``.beton`` files: written atomically, and checked before use."""

import contextlib
import importlib
import math
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from recipes.errors import RecipeError
from recipes.image_data.sources import Bytes, Photographs

# Bytes, a power of two. FFCV stores an image within one page.
_PAGE = 1 << 23
INSTALL_FFCV = (
    "install the system packages pkg-config, libturbojpeg0-dev and libopencv-dev, and then "
    "`pip install ffcv`"
)


def import_ffcv(name: str = "") -> ModuleType:
    """Import ffcv or a module of it without its side effect: it changes torch's threads."""
    threads = torch.get_num_threads()
    try:
        return importlib.import_module(f"ffcv.{name}" if name else "ffcv")
    # OSError: a system library that ffcv links to is missing.
    except (ImportError, OSError) as error:
        raise RecipeError(
            f"ffcv cannot be imported ({error}); {INSTALL_FFCV}, or use --loader torchvision"
        ) from None
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class PhotographFormat:
    """How photographs are stored. The defaults are those of FFCV's ImageNet recipe."""

    max_resolution: int = 500  # of the longer side in pixels; larger images are resized
    jpeg_share: float = 0.5  # of the images that are stored as JPEG, the rest as raw pixels
    quality: int = 90  # of JPEG

    def __post_init__(self) -> None:
        # An image must fit in a page. FFCV's writer hangs at one that does not.
        largest = math.isqrt(_PAGE // 3)
        limits = {
            "--max-resolution": (self.max_resolution, 1, largest),
            "--jpeg-share": (self.jpeg_share, 0, 1),
            "--quality": (self.quality, 1, 100),
        }
        for flag, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise RecipeError(f"{flag} must be {low} to {high}, found {value}")

    def file_name(self, split: str) -> str:
        """Return FFCV's usual file name, from split, resolution, JPEG share and quality."""
        return f"{split}_{self.max_resolution}_{self.jpeg_share:.2f}_{self.quality}.beton"


def write_beton(
    path: Path,
    source: Photographs,
    stored: PhotographFormat = PhotographFormat(),
    workers: int = 1,
    progress: bool = False,
) -> None:
    """Write ``source`` to ``path``. An existing file is replaced when the new one is complete."""
    if len(source) == 0:
        raise RecipeError(f"{path} was not written: the data set has no images")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    safe_source, fields = _NonRaising(source), import_ffcv("fields")
    image = fields.RGBImageField(
        write_mode="proportion",
        max_resolution=stored.max_resolution,
        compress_probability=stored.jpeg_share,
        jpeg_quality=stored.quality,
    )
    try:
        writer = import_ffcv("writer").DatasetWriter(
            str(unfinished),
            {"image": image, "label": fields.IntField()},
            page_size=_PAGE,
            num_workers=workers,
        )
        with contextlib.nullcontext() if progress else _silent():
            writer.from_indexed_dataset(safe_source)
        safe_source.raise_first_error()
        # Only now is the file complete, and an error above leaves the old one.
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    # FFCV's writer shows a progress bar even without a terminal, and has no option for it.
    with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
        yield


class _NonRaising:
    """A source that returns a blank image in place of one that cannot be decoded.

    An exception would end the worker process that reads the image, and FFCV's writer would wait for
    it forever. The workers record the first error instead, and the parent raises it.
    """

    def __init__(self, source: Photographs) -> None:
        self.source = source
        # Shared by the worker processes.
        self.errors = multiprocessing.Value("Q", 0)
        self.first_error: Any = multiprocessing.SimpleQueue()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Bytes, int]:
        try:
            return self.source[index]
        except RecipeError as error:
            with self.errors.get_lock():
                if self.errors.value == 0:
                    self.first_error.put(str(error))
                self.errors.value += 1
            return np.zeros((1, 1, 3), np.uint8), 0

    def raise_first_error(self) -> None:
        if count := self.errors.value:
            raise RecipeError(f"{self.first_error.get()} [{count} of {len(self)} images failed]")


def check_beton(path: Path) -> None:
    """Raise RecipeError unless a file is complete and has the version of the installed ffcv."""
    types = import_ffcv("types")
    size = path.stat().st_size if path.is_file() else 0
    problem = "it is missing or empty"
    if size >= types.HeaderType.itemsize:
        (header,) = np.fromfile(path, dtype=types.HeaderType, count=1)
        samples, table = int(header["num_samples"]), int(header["alloc_table_ptr"])
        # The table of all images is at the end of the file. Its address is written last, into the
        # header, so 0 means that the writer did not finish.
        needed = table + samples * types.ALLOC_TABLE_TYPE.itemsize
        problem = ""
        if header["version"] != types.CURRENT_VERSION:
            problem = f"its format version is {header['version']}"
        elif not samples:
            problem = "it has 0 samples"
        elif not table or size < needed:
            problem = f"it is truncated: it has {size} bytes, expected {needed}"
    if problem:
        raise RecipeError(
            f"{path} cannot be used: {problem}; write it with python -m recipes.write_beton"
        )
