"""The pictures, computed from the files of the results."""

from pathlib import Path


def draw_all(folder: Path) -> None:
    pass
