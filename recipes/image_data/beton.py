"""FFCV's ``.beton`` files: written whole or not at all, checked before use, cached by content."""

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

# Raised when the same images come out as other bytes, so that cached files are written again.
WRITER_VERSION = 1
_SMALL_PAGE, _LARGE_PAGE = 1 << 21, 1 << 23


def import_ffcv() -> ModuleType:
    """Import ffcv, which sets torch's number of threads as it loads; set it back."""
    threads = torch.get_num_threads()
    try:
        return importlib.import_module("ffcv")
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class PhotographFormat:
    """How photographs are stored; the defaults are what FFCV's own ImageNet recipe uses."""

    max_resolution: int = 500
    jpeg_share: float = 0.5
    quality: int = 90

    def __post_init__(self) -> None:
        # FFCV keeps an image within one page, and one that does not fit stops its writer for ever.
        most = math.isqrt(_LARGE_PAGE // 3)
        if not 1 <= self.max_resolution <= most:
            raise RecipeError(f"the resolution must be 1 to {most}, found {self.max_resolution}")
        if not 0 <= self.jpeg_share <= 1:
            raise RecipeError(f"the JPEG share must be 0 to 1, found {self.jpeg_share}")
        if not 1 <= self.quality <= 100:
            raise RecipeError(f"the JPEG quality must be 1 to 100, found {self.quality}")

    def file_name(self, split: str) -> str:
        """Name a file as FFCV's users do: split, resolution, JPEG share, quality."""
        return f"{split}_{self.max_resolution}_{self.jpeg_share:.2f}_{self.quality}.beton"


def write_beton(
    path: Path,
    source: Arrays | Photographs,
    style: PhotographFormat | None = None,
    workers: int = 1,
    progress: bool = False,
) -> None:
    """Write ``source`` to ``path``, replacing it only when the new file is complete."""
    if len(source) == 0:
        raise RecipeError(f"there is nothing to write to {path}: the data set is empty")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    watched = _Watched(source)
    page = _SMALL_PAGE if isinstance(source, Arrays) else _LARGE_PAGE
    try:
        writer = _ffcv("writer").DatasetWriter(
            str(unfinished), _fields(source, style), page_size=page, num_workers=workers
        )
        with contextlib.nullcontext() if progress else _quiet():
            writer.from_indexed_dataset(watched)
        watched.raise_first_error()
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # FFCV's writer shows a progress bar whether or not there is a terminal.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def _ffcv(name: str) -> ModuleType:
    import_ffcv()
    return importlib.import_module(f"ffcv.{name}")


def _fields(source: Arrays | Photographs, style: PhotographFormat | None) -> dict[str, Any]:
    ffcv_fields = _ffcv("fields")
    return {"image": _image_field(source, style), "label": ffcv_fields.IntField()}


def _image_field(source: Arrays | Photographs, style: PhotographFormat | None) -> Any:
    ffcv_fields = _ffcv("fields")
    if isinstance(source, Photographs):
        style = style or PhotographFormat()
        return ffcv_fields.RGBImageField(
            write_mode="proportion",
            max_resolution=style.max_resolution,
            compress_probability=style.jpeg_share,
            jpeg_quality=style.quality,
        )
    if source.images.shape[-1] == 3:
        return ffcv_fields.RGBImageField(write_mode="raw")
    return ffcv_fields.NDArrayField(np.dtype("uint8"), source.images.shape[1:])


class _Watched:
    """A source that hands out a blank image instead of raising.

    FFCV's writer waits for ever for a worker process that an exception has ended, so the worker
    notes the first error and goes on, and the parent raises it.
    """

    def __init__(self, source: Arrays | Photographs) -> None:
        self.source = source
        self.errors = multiprocessing.Value("Q", 0)
        self.first: Any = multiprocessing.SimpleQueue()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Bytes, int]:
        try:
            return self.source[index]
        except RecipeError as error:
            self._note(str(error))
            return np.zeros((1, 1, 3), np.uint8), 0

    def _note(self, error: str) -> None:
        with self.errors.get_lock():
            if self.errors.value == 0:
                self.first.put(error)
            self.errors.value += 1

    def raise_first_error(self) -> None:
        count = self.errors.value
        if count:
            raise RecipeError(f"{self.first.get()} [{count} of {len(self)} images are bad]")


def check_beton(path: Path) -> None:
    """Refuse a file that is missing, cut short or of another format version."""
    types = _ffcv("types")
    if not path.is_file():
        raise RecipeError(f"no {path}: write it with python -m recipes.write_beton")
    header = np.fromfile(path, dtype=types.HeaderType, count=1)
    if len(header) == 0:
        raise RecipeError(_damaged(path, "it has no header"))
    if header["version"][0] != types.CURRENT_VERSION:
        raise RecipeError(_damaged(path, f"its format version is {header['version'][0]}"))
    samples, table = int(header["num_samples"][0]), int(header["alloc_table_ptr"][0])
    if samples == 0:
        raise RecipeError(f"{path} is empty: it holds no samples")
    # The header is completed last, and the table of all images ends the file.
    needed = table + samples * types.ALLOC_TABLE_TYPE.itemsize
    if table == 0 or path.stat().st_size < needed:
        raise RecipeError(_damaged(path, f"it has {path.stat().st_size} bytes of {needed}"))


def _damaged(path: Path, reason: str) -> str:
    return (
        f"{path} is damaged or cut short ({reason}); write it again with "
        "python -m recipes.write_beton"
    )


def cached_beton(folder: Path, name: str, source: Arrays) -> Path:
    """Return a file that holds ``source``, written now unless a good one is there already.

    Several processes may ask at once: one writes while the others wait for its lock, and the
    kernel drops the lock of a process that dies.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, note = folder / f"{name}.beton", folder / f"{name}.json"
    wanted = {"source": source.fingerprint(), "writer": _writer_version()}
    with _locked(folder / f"{name}.lock"):
        if not _is_fresh(path, note, wanted):
            for leftover in folder.glob(f".{name}.*"):
                leftover.unlink()
            write_beton(path, source)
            _replace_text(note, json.dumps({**wanted, "beton": _digest(path)}))
    return path


def _writer_version() -> str:
    return f"{WRITER_VERSION}, ffcv {_ffcv('types').CURRENT_VERSION}"


def _is_fresh(path: Path, note: Path, wanted: dict[str, str]) -> bool:
    try:
        found = json.loads(note.read_text())
        return bool(found == {**wanted, "beton": _digest(path)})
    except (OSError, ValueError):
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _replace_text(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    os.replace(unfinished, path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
