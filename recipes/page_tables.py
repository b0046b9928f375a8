"""The tables of the pages, written from the committed results.

    python -m recipes.page_tables           # after a measurement: write all tables again
    python -m recipes.page_tables --check   # only compare; exit status 1 if a page differs

A page marks where a table belongs:

    <!-- table: qsr/accuracy -->
    <!-- end -->

The text between the two lines is ``TABLES["accuracy"]`` of ``recipes/qsr/tables.py``, a function
from the folder of the results to markdown. The folder ``benchmarks`` is beside the recipes. A test
compares all pages with the results.
"""

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from recipes.errors import RecipeError, exit_on_user_error

TableMaker = Callable[[Path], str]
"""From the folder of the results to markdown."""

_HERE = Path(__file__).resolve().parent
_STARTS = re.compile(r"<!-- table: ")
# The text between the marks contains no other mark.
_MARKED = re.compile(r"(<!-- table: (\w+)/(\w+) -->\n)(?:(?!<!-- ).)*(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Write the tables of all pages, or compare them."""
    with exit_on_user_error():
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
        parser.add_argument("--check", action="store_true", help="compare, and write nothing")
        arguments = parser.parse_args()
        differing = [path for path in pages() if path.read_text() != filled(path.read_text())]
    for path in differing:
        if arguments.check:
            print(f"{path.relative_to(_HERE.parent)} differs from the results")
        else:
            path.write_text(filled(path.read_text()))
            print(f"wrote {path.relative_to(_HERE.parent)}")
    sys.exit(1 if differing and arguments.check else 0)


def pages() -> Iterator[Path]:
    """Yield the pages that have tables."""
    for folder in (_HERE, _HERE.parent / "docs"):
        for path in sorted(folder.rglob("*.md")):
            if _STARTS.search(path.read_text()):
                yield path


def filled(text: str) -> str:
    """Return a page with its tables written again.

    Raises:
        RecipeError: if a table is unknown, or a mark has no end.
    """
    if len(_STARTS.findall(text)) != len(_MARKED.findall(text)):
        raise RecipeError("a mark <!-- table: folder/name --> has no <!-- end --> after it")
    return _MARKED.sub(_written, text)


def _written(match: re.Match[str]) -> str:
    folder, name = match[2], match[3]
    tables = tables_of(folder)
    if name not in tables:
        raise RecipeError(f"{folder}/tables.py has no table {name!r}, only {[*tables]}")
    table = tables[name](_place(folder) / "results").strip()
    return f"{match[1]}{table}\n{match[4]}"


def tables_of(folder: str) -> Mapping[str, TableMaker]:
    """Return the tables that a folder makes, by name.

    Raises:
        RecipeError: if the folder has no ``tables.py``.
    """
    place = _place(folder).relative_to(_HERE.parent)
    if not (_place(folder) / "tables.py").is_file():
        raise RecipeError(f"{place}/tables.py does not exist")
    tables: Mapping[str, TableMaker] = importlib.import_module(
        f"{'.'.join(place.parts)}.tables"
    ).TABLES
    return tables


def _place(folder: str) -> Path:
    return _HERE.parent / folder if folder == "benchmarks" else _HERE / folder


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


if __name__ == "__main__":
    main()
