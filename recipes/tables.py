"""Tables in markdown: a list of groups, and the columns as functions of a group."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

TableMaker = Callable[[Path], str]
"""From the folder of the results to markdown."""
_Group = TypeVar("_Group")


def table(columns: Mapping[str, Callable[[_Group], object]], groups: Iterable[_Group]) -> str:
    """Return a table with a row for each group. A column is its head and its cell of a group."""
    rows = [[cell(group) for cell in columns.values()] for group in groups]
    return markdown_table(list(columns), rows)


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
