"""Files that are whole or not there, and log files that do not end a run on a full disk."""

import hashlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


class _HashingWriter(io.BufferedWriter):
    """A new file, and the SHA-256 of all bytes that are written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.sha256 = hashlib.sha256()

    def write(self, data: Any, /) -> int:
        self.sha256.update(data)
        return super().write(data)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> str:
    """Write a file beside the old one, sync it, and put it in the place of the old one."""
    unfinished = path.with_name(f".{path.name}")
    try:
        # Given a path, torch.save() would raise other errors than OSError.
        with _HashingWriter(unfinished) as file:
            write(file)
            # os.replace() is atomic, but it can reach the disk before the content does.
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except Exception as error:
        # A full disk has no space for half a file.
        unfinished.unlink(missing_ok=True)
        # In the middle of a large tensor, torch.save() raises a RuntimeError about its position in
        # the file while it handles the error of the disk.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    return file.sha256.hexdigest()


class LogFile:
    """A file to which a run adds lines. The first error is printed, the others are ignored."""

    def __init__(self, path: Path) -> None:
        self._path, self._has_failed = path, False

    def write(self, line: str) -> None:
        """Add a line. It survives a kill."""
        # In one piece, because several ranks can write to the same file.
        with self._going_on(), self._path.open("ab", buffering=0) as file:
            file.write(f"{line}\n".encode())

    def replace(self, lines: Iterable[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        with self._going_on():
            write_atomically(self._path, lambda file: file.write(text.encode()))

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                problem = f"{self._path} cannot be written ({error.strerror})"
                print(f"{problem}: the run goes on, and lines are missing", file=sys.stderr)
            self._has_failed = True
