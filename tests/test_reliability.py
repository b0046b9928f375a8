"""docs/reliability.md: every promise has a test that runs."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text()
# A row ends with the name of its test, without `test_`. (soak) follows if only the soak runs it.
ROWS = re.findall(r"^\| (.+?) \| .* \| `([a-z]\w+)`( \(soak\))? \|$", PAGE, re.MULTILINE)


def marks(tree, function):
    """Return the marks that all cases of a test have, such as "soak"."""
    found = {ast.unparse(each) for each in function.decorator_list}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            found.add(ast.unparse(node.value))
    # A mark, or a parameter all of whose cases have it.
    names = [re.match(r"pytest\.mark\.(?:parametrize\([^,]+, )?(\w+)", each) for each in found]
    return {name[1] for name in names if name}


@pytest.fixture(scope="module")
def tests():
    """Return the marks of each test function, by name."""
    found = {}
    for path in TESTS.rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.setdefault(node.name, []).append(marks(tree, node))
    return found


def test_every_row_has_a_test_and_there_are_at_least_60():
    rows = [line for line in PAGE.splitlines() if re.match(r"\| (?!---|.*\| test \|$)", line)]
    assert len(ROWS) >= 60
    # The other rows are the heads of the tables, and those of the soak.
    assert len([row for row in rows if "`" in row.split("|")[-2]]) == len(ROWS)


@pytest.mark.parametrize(("name", "soak"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_test_of_a_row_runs(name, soak, tests):
    assert f"test_{name}" in tests
    for found in tests[f"test_{name}"]:
        assert not found & {"thorough", "slow", "integrations"}
        assert ("soak" in found) == bool(soak)
