"""Write the tables and the pictures of the pages from the CSV files in benchmarks/results.

    python -m benchmarks.report            # both
    python -m benchmarks.report --page     # the tables only, which need no matplotlib

The pages are those of docs/ that have tables of benchmarks: benchmarks/tables.py makes these, and
benchmarks/pictures.py the pictures. `python -m recipes.page_tables --check` compares the tables.
"""

import argparse
from pathlib import Path

from benchmarks import pictures
from recipes.page_tables import filled

_HERE = Path(__file__).resolve().parent
RESULTS, DOCS = _HERE / "results", _HERE.parent / "docs"
PAGES = ("performance.md", "prediction.md", "reliability.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the tables, and no picture")
    options = parser.parse_args()
    for name in PAGES:
        (DOCS / name).write_text(filled((DOCS / name).read_text()))
    if not options.page:
        pictures.draw_all(RESULTS, DOCS / "performance")


if __name__ == "__main__":
    main()
