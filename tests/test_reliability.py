"""docs/reliability.md: every promise has a test that runs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
ROWS = [
    line
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and "](../tests/" in line
]


def linked(row: str) -> Iterator[tuple[str, Path, bool]]:
    """Yield the tests of a row: name, file, and whether the row says that they are of the soak."""
    for name, file, soak in re.findall(r"\[([a-z]\w+)\]\((\S+?\.py)\)( \(soak\))?", row):
        yield f"test_{name}", PAGE.parent / file, bool(soak)


def marks(tree: ast.Module, function: ast.FunctionDef) -> set[str]:
    """Return the marks that all cases of a test have, such as "soak"."""
    found = {ast.unparse(each) for each in function.decorator_list}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            found.add(ast.unparse(node.value))
    # A mark, or a parameter all of whose cases have it.
    names = [re.match(r"pytest\.mark\.(?:parametrize\([^,]+, )?(\w+)", each) for each in found]
    return {name[1] for name in names if name}


def test_there_are_at_least_60_rows() -> None:
    assert len(ROWS) >= 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_tests_of_a_row_run(row: str) -> None:
    tests = list(linked(row))
    assert tests
    for name, file, soak in tests:
        tree = ast.parse(file.read_text())
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        (function,) = [node for node in nodes if node.name == name]
        found = marks(tree, function)
        assert not found & {"thorough", "slow", "integrations"}, name
        assert ("soak" in found) == soak, name
