"""The output of a run: a progress bar, ``metrics.jsonl`` and ``summary.json``."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from recipes.errors import RecipeError
from recipes.files import LogFile, write_atomically
from recipes.result_files import make_folder


class Report:
    """Prints progress and writes the metrics files. Does nothing on ranks other than 0."""

    def __init__(self, folder: Path, *, total: int, done: int, is_main: bool) -> None:
        self._is_main, self._interactive = is_main, sys.stderr.isatty()
        self._folder = folder
        if is_main:
            make_folder(folder)
            path = folder / "metrics.jsonl"
            self._metrics = LogFile(path)
            # A killed run has logged steps after its last checkpoint. The resumed run repeats them.
            self._metrics.replace(_lines_until(done, path))
        # A bar that is redrawn would fill a log file.
        shown = is_main and self._interactive
        self._bar = tqdm(
            total=total, initial=done, unit="step", disable=not shown, dynamic_ncols=True
        )

    def advance(self) -> None:
        self._bar.update()

    def log_metrics(self, **values: Any) -> None:
        if self._is_main:
            self._metrics.write(json.dumps(values))

    def print(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._is_main and self._interactive:
            self._bar.write(text)
        elif self._is_main:
            print(text, flush=True)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``. Its existence means that the run has finished."""
        text = json.dumps(summary, indent=2) + "\n"
        self.write_result("summary.json", lambda file: file.write(text.encode()))

    def write_result(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        if not self._is_main:
            return
        path = self._folder / name
        try:
            write_atomically(path, write)
        except OSError as error:
            raise RecipeError(
                f"{path} could not be written ({error.strerror}). Solve that, and start the run "
                "again with --auto-resume"
            ) from None

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


def _lines_until(step: int, path: Path) -> list[str]:
    if step == 0 or not path.is_file():
        return []
    lines = path.read_text(errors="replace").splitlines()
    return [line for line in lines if _is_until(step, line)]


def _is_until(step: int, line: str) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, LookupError, TypeError):
        # A killed run can leave half a line, and a machine that lost power a block of NULs.
        return False
