"""FFCV's ``.beton`` files: written atomically, checked before use, and cached by content."""

import contextlib
import fcntl
import hashlib
import importlib
import json
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
from recipes.image_data.sources import Arrays, Bytes, Photographs

# Increase it when the same images are written as other bytes: cached files are then replaced.
WRITER_VERSION = 1
# Bytes, powers of two. FFCV stores an image within one page.
_SMALL_PAGE, _LARGE_PAGE = 1 << 21, 1 << 23

INSTALL_FFCV = (
    "install the system packages pkg-config, libturbojpeg0-dev and libopencv-dev, and then "
    "`pip install ffcv`"
)


def import_ffcv() -> ModuleType:
    """Import ffcv without its side effect: it changes torch's number of threads."""
    threads = torch.get_num_threads()
    try:
        return importlib.import_module("ffcv")
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class PhotographFormat:
    """How photographs are stored. The defaults are those of FFCV's ImageNet recipe.

    Attributes:
        max_resolution: maximum length of the longer side in pixels. Larger images are resized.
        jpeg_share: share of the images that are stored as JPEG, the rest as raw pixels.
        quality: JPEG quality, 1 to 100.
    """

    max_resolution: int = 500
    jpeg_share: float = 0.5
    quality: int = 90

    def __post_init__(self) -> None:
        # An image must fit in a page. FFCV's writer hangs at one that does not.
        largest = math.isqrt(_LARGE_PAGE // 3)
        if not 1 <= self.max_resolution <= largest:
            raise RecipeError(
                f"--max-resolution must be 1 to {largest}, found {self.max_resolution}"
            )
        if not 0 <= self.jpeg_share <= 1:
            raise RecipeError(f"--jpeg-share must be 0 to 1, found {self.jpeg_share}")
        if not 1 <= self.quality <= 100:
            raise RecipeError(f"--quality must be 1 to 100, found {self.quality}")

    def file_name(self, split: str) -> str:
        """Return FFCV's usual file name, from split, resolution, JPEG share and quality."""
        return f"{split}_{self.max_resolution}_{self.jpeg_share:.2f}_{self.quality}.beton"


def write_beton(
    path: Path,
    source: Arrays | Photographs,
    photograph_format: PhotographFormat | None = None,
    workers: int = 1,
    progress: bool = False,
) -> None:
    """Write ``source`` to ``path``. An existing file is replaced when the new one is complete.

    Args:
        path: of the new file.
        source: the images and labels.
        photograph_format: for photographs; None for the default.
        workers: number of processes that encode images.
        progress: show FFCV's progress bar.

    Raises:
        RecipeError: if there are no images, or if an image cannot be decoded.
    """
    if len(source) == 0:
        raise RecipeError(f"{path} was not written: the data set has no images")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    safe_source = _NonRaising(source)
    page = _SMALL_PAGE if isinstance(source, Arrays) else _LARGE_PAGE
    try:
        writer = _ffcv("writer").DatasetWriter(
            str(unfinished), _fields(source, photograph_format), page_size=page, num_workers=workers
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


def _ffcv(name: str) -> ModuleType:
    import_ffcv()
    return importlib.import_module(f"ffcv.{name}")


def _fields(
    source: Arrays | Photographs, photograph_format: PhotographFormat | None
) -> dict[str, Any]:
    ffcv_fields = _ffcv("fields")
    return {"image": _image_field(source, photograph_format), "label": ffcv_fields.IntField()}


def _image_field(source: Arrays | Photographs, photograph_format: PhotographFormat | None) -> Any:
    ffcv_fields = _ffcv("fields")
    if isinstance(source, Photographs):
        chosen = photograph_format or PhotographFormat()
        return ffcv_fields.RGBImageField(
            write_mode="proportion",
            max_resolution=chosen.max_resolution,
            compress_probability=chosen.jpeg_share,
            jpeg_quality=chosen.quality,
        )
    if source.images.shape[-1] == 3:
        return ffcv_fields.RGBImageField(write_mode="raw")
    return ffcv_fields.NDArrayField(np.dtype("uint8"), source.images.shape[1:])


class _NonRaising:
    """A source that returns a blank image in place of one that cannot be decoded.

    An exception would end the worker process that reads the image, and FFCV's writer would wait
    for that process forever. The workers record the first error instead, and the parent raises it.
    """

    def __init__(self, source: Arrays | Photographs) -> None:
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
            self._record(str(error))
            return np.zeros((1, 1, 3), np.uint8), 0

    def _record(self, error: str) -> None:
        with self.errors.get_lock():
            if self.errors.value == 0:
                self.first_error.put(error)
            self.errors.value += 1

    def raise_first_error(self) -> None:
        """Raise the first error that a worker recorded, if any."""
        count = self.errors.value
        if count:
            raise RecipeError(f"{self.first_error.get()} [{count} of {len(self)} images failed]")


def check_beton(path: Path) -> None:
    """Check that a file is complete and has the format version of the installed ffcv.

    Raises:
        RecipeError: if it is missing, empty, truncated or of another version.
    """
    types = _ffcv("types")
    if not path.is_file():
        raise RecipeError(f"{path} is missing; write it with python -m recipes.write_beton")
    header = np.fromfile(path, dtype=types.HeaderType, count=1)
    if len(header) == 0:
        raise RecipeError(_damaged(path, "it has no header"))
    if header["version"][0] != types.CURRENT_VERSION:
        raise RecipeError(_damaged(path, f"its format version is {header['version'][0]}"))
    samples, table = int(header["num_samples"][0]), int(header["alloc_table_ptr"][0])
    if samples == 0:
        raise RecipeError(
            f"{path} has 0 samples; write it again with python -m recipes.write_beton"
        )
    # The table of all images is at the end of the file. Its address is written last, into the
    # header, so 0 means that the writer did not finish.
    needed = table + samples * types.ALLOC_TABLE_TYPE.itemsize
    if table == 0 or path.stat().st_size < needed:
        raise RecipeError(_damaged(path, f"it has {path.stat().st_size} bytes, expected {needed}"))


def _damaged(path: Path, reason: str) -> str:
    return (
        f"{path} is damaged or truncated: {reason}; write it again with "
        "python -m recipes.write_beton"
    )


def cached_beton(folder: Path, name: str, source: Arrays) -> Path:
    """Return a file with the content of ``source``. Write it unless a valid one is in ``folder``.

    Several processes can call this at the same time: one writes, and the others wait.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, record = folder / f"{name}.beton", folder / f"{name}.json"
    # The same content, written by the same code in the same format version.
    wanted = {"source": source.fingerprint(), "writer": _writer_version()}
    with _locked(folder / f"{name}.lock"):
        if not _is_fresh(path, record, wanted):
            # Unfinished files of processes that were killed. Nobody else writes under the lock.
            for leftover in folder.glob(f".{name}.*"):
                leftover.unlink()
            write_beton(path, source)
            _replace_text(record, json.dumps({**wanted, "beton": _digest(path)}))
    return path


def _writer_version() -> str:
    return f"{WRITER_VERSION}, ffcv {_ffcv('types').CURRENT_VERSION}"


def _is_fresh(path: Path, record: Path, wanted: dict[str, str]) -> bool:
    try:
        found = json.loads(record.read_text())
        return bool(found == {**wanted, "beton": _digest(path)})
    except (OSError, ValueError):
        # No record, or a damaged one: the content of the file is unknown.
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _replace_text(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    os.replace(unfinished, path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel releases the lock of a process that is killed.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
