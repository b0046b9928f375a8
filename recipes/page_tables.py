"""The tables and pictures of the pages, made from the committed results.

    python -m recipes.page_tables             # after a measurement: write all tables again
    python -m recipes.page_tables --check     # only compare; exit status 1 if a page differs
    python -m recipes.page_tables --pictures  # also draw all pictures again

Between the lines ``<!-- table: qsr/accuracy -->`` and ``<!-- end -->``, a page has the text of
``TABLES["accuracy"]`` of ``recipes/qsr/tables.py``, a function of the folder of the results.
``PICTURES`` of ``recipes/qsr/pictures.py`` has the pictures by the names of their files.
"""

import argparse
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.errors import RecipeError, exit_on_user_error

_HERE = Path(__file__).resolve().parent
_STARTS = re.compile(r"<!-- table: ")
# The text between the marks contains no other mark.
_MARKED = re.compile(r"(<!-- table: (\w+)/(\w+) -->\n)(?:(?!<!-- ).)*(<!-- end -->)", re.DOTALL)


def main() -> None:
    with exit_on_user_error():
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
        parser.add_argument("--check", action="store_true", help="compare, and write nothing")
        parser.add_argument("--pictures", action="store_true", help="also draw the pictures")
        arguments = parser.parse_args()
        differing = [path for path in pages() if path.read_text() != filled(path.read_text())]
    for path in differing:
        if arguments.check:
            print(f"{path.relative_to(_HERE.parent)} differs from the results")
        else:
            path.write_text(filled(path.read_text()))
            print(f"wrote {path.relative_to(_HERE.parent)}")
    if arguments.pictures and not arguments.check:
        draw_pictures()
    sys.exit(1 if differing and arguments.check else 0)


def draw_pictures() -> None:
    for module in sorted(_HERE.glob("*/pictures.py")):
        folder = module.parent / "results"
        for name, picture in _made_by(module.parent.name, "pictures").items():
            picture(folder, folder / f"{name}.png")
            print(f"drew {folder.relative_to(_HERE.parent)}/{name}.png")


def pages() -> Iterator[Path]:
    for folder in (_HERE, _HERE.parent / "docs"):
        for path in sorted(folder.rglob("*.md")):
            if _STARTS.search(path.read_text()):
                yield path


def filled(text: str) -> str:
    if len(_STARTS.findall(text)) != len(_MARKED.findall(text)):
        raise RecipeError("a mark <!-- table: folder/name --> has no <!-- end --> after it")
    return _MARKED.sub(_written, text)


def _written(match: re.Match[str]) -> str:
    folder, name = match[2], match[3]
    tables = _made_by(folder, "tables")
    if name not in tables:
        raise RecipeError(f"{folder}/tables.py has no table {name!r}, only {[*tables]}")
    table = tables[name](_place(folder) / "results").strip()
    return f"{match[1]}{table}\n{match[4]}"


def _made_by(folder: str, kind: str) -> dict[str, Any]:
    file = _place(folder) / f"{kind}.py"
    name = file.relative_to(_HERE.parent)
    if not file.is_file():
        raise RecipeError(f"{name} does not exist")
    module = importlib.import_module(".".join(name.with_suffix("").parts))
    made: dict[str, Any] = getattr(module, kind.upper())
    return made


def _place(folder: str) -> Path:
    return _HERE.parent / folder if folder == "benchmarks" else _HERE / folder


if __name__ == "__main__":
    main()
