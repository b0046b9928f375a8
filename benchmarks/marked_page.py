"""Pages of docs/ with tables between two marks, which a program writes from CSV files."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report_data import Row

_ROOT = Path(__file__).parents[1]
RESULTS = _ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class MarkedPage:
    """A page with ``<!-- NAME -->``, the tables, and ``<!-- end -->``.

    Attributes:
        name: of the mark.
        path: of the page, within docs/.
        tables: writes the tables from a folder of results.
    """

    name: str
    path: str
    tables: Callable[[Path], str]

    def filled(self, results: Path = RESULTS) -> str:
        """Return the page with its tables written again."""
        marked = re.compile(rf"(<!-- {self.name} -->\n).*?(<!-- end -->)", re.DOTALL)
        written = self.tables(results) or "Not measured yet."
        return marked.sub(lambda match: f"{match[1]}{written}\n{match[2]}", self.text)

    @property
    def text(self) -> str:
        """The page as it is."""
        return (_ROOT / "docs" / self.path).read_text()

    def main(self, description: str | None) -> None:
        """Write the page or, with ``--check``, exit with 1 if it differs."""
        parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
        help_text = "write nothing; exit 1 if the page differs"
        parser.add_argument("--check", action="store_true", help=help_text)
        check, text = parser.parse_args().check, self.filled()
        if not check:
            (_ROOT / "docs" / self.path).write_text(text)
        elif text != self.text:
            sys.exit(f"docs/{self.path} differs: run python -m benchmarks.report_{self.name}")


def distinct(rows: Sequence[Row], column: str) -> str:
    """Return all values of a column, dates without the time."""
    return ", ".join(sorted({row[column].partition("T")[0] for row in rows}))


def machine(rows: Sequence[Row]) -> str:
    """Return when and where rows were measured, as the end of a sentence."""
    return (
        f"on {distinct(rows, 'device')} with {distinct(rows, 'cpus')} cores, torch "
        f"{distinct(rows, 'torch')}, revision {distinct(rows, 'revision')} (+: with uncommitted "
        "changes)"
    )
