"""Log files that do not end a run: on a full disk, it goes on without some of their lines."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.atomic_files import write_atomically


class LogFile:
    """A file to which a run adds lines. The first error is printed, the others are ignored.

    Args:
        path: of the file. Its folder must exist.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._has_failed = path, False

    def write(self, line: str) -> None:
        """Add a line. It survives a kill."""
        # In one piece, because several ranks can write to the same file.
        with self._going_on(), self._path.open("ab", buffering=0) as file:
            file.write(f"{line}\n".encode())

    def replace(self, lines: Iterable[str]) -> None:
        """Replace the content of the file."""
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
