"""The output of a run: a progress bar, ``metrics.jsonl`` and ``summary.json``."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm


class Report:
    """Prints progress and writes the metrics files. Does nothing on ranks other than 0.

    Args:
        folder: for the files.
        total: number of optimizer steps of the run.
        done: how many of them an earlier run has taken, with ``--resume``.
        is_main: whether this rank prints and writes.
    """

    def __init__(self, folder: Path, *, total: int, done: int, is_main: bool) -> None:
        self._is_main, self._interactive = is_main, sys.stderr.isatty()
        self._folder = folder
        if is_main:
            folder.mkdir(parents=True, exist_ok=True)
            self._metrics = _open_metrics(folder / "metrics.jsonl", done)
        # A bar that is redrawn would fill a log file.
        shown = is_main and self._interactive
        self._bar = tqdm(
            total=total, initial=done, unit="step", disable=not shown, dynamic_ncols=True
        )

    def advance(self) -> None:
        """Advance the progress bar by one step."""
        self._bar.update()

    def log_metrics(self, **values: Any) -> None:
        """Write one line of ``metrics.jsonl``."""
        if self._is_main:
            self._metrics.write(json.dumps(values) + "\n")
            # A killed run keeps its metrics.
            self._metrics.flush()

    def print(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._is_main and self._interactive:
            self._bar.write(text)
        elif self._is_main:
            print(text, flush=True)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``."""
        if self._is_main:
            # A kill must not leave half a file: its existence means that the run has finished.
            unfinished = self._folder / ".summary.json"
            unfinished.write_text(json.dumps(summary, indent=2) + "\n")
            os.replace(unfinished, self._folder / "summary.json")

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
        if self._is_main:
            self._metrics.close()


def _open_metrics(path: Path, done: int) -> Any:
    """Open ``path`` for appending, after deleting all lines of steps later than ``done``."""
    # A killed run has logged steps after its last checkpoint. The resumed run repeats them.
    kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= done] if done else []
    path.write_text("".join(kept))
    return path.open("a")


def _whole_lines(path: Path) -> list[str]:
    # A killed run can leave half a line at the end.
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [line for line in lines if line.endswith("\n")]
