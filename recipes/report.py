"""What a run tells: a progress bar for people, ``metrics.jsonl`` and ``summary.json`` for tools."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm


class Report:
    """Progress and metrics of a run; silent on every rank but the first."""

    def __init__(self, folder: Path, *, total: int, done: int, speaks: bool) -> None:
        self._speaks, self._interactive = speaks, sys.stderr.isatty()
        self._folder = folder
        if speaks:
            folder.mkdir(parents=True, exist_ok=True)
            self._metrics = _opened(folder / "metrics.jsonl", done)
        shows = speaks and self._interactive
        self._bar = tqdm(
            total=total, initial=done, unit="step", disable=not shows, dynamic_ncols=True
        )

    def step(self) -> None:
        """Move the bar by a step."""
        self._bar.update()

    def line(self, **values: Any) -> None:
        """Write one line of metrics, at once on disk in case the run is killed."""
        if self._speaks:
            self._metrics.write(json.dumps(values) + "\n")
            self._metrics.flush()

    def say(self, text: str) -> None:
        """Print a line for people, above the bar where there is one."""
        if self._speaks and self._interactive:
            self._bar.write(text)
        elif self._speaks:
            print(text, flush=True)

    def summarise(self, summary: dict[str, Any]) -> None:
        """Write the summary."""
        if self._speaks:
            unfinished = self._folder / ".summary.json"
            unfinished.write_text(json.dumps(summary, indent=2) + "\n")
            os.replace(unfinished, self._folder / "summary.json")

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
        if self._speaks:
            self._metrics.close()


def _opened(path: Path, done: int) -> Any:
    """Open ``path`` for appending after the lines that belong to the first ``done`` steps."""
    kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= done] if done else []
    path.write_text("".join(kept))
    return path.open("a")


def _whole_lines(path: Path) -> list[str]:
    # A killed run may have left half a line at the end.
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [line for line in lines if line.endswith("\n")]
