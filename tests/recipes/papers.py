"""What the tests of the papers' experiments share: quick runs, and rows of the published tables."""

import importlib
import sys

from recipes.rows import read_rows, where
from tests.recipes.forked_ranks import RECIPES


def quick(name, out, monkeypatch, *flags):
    """Run an experiment with --quick in this process, and again with --resume: nothing is new."""
    program = importlib.import_module(f"recipes.{name}.experiment")
    written = []
    for more in ([], ["--resume"]):
        words = ["--quick", "--out", str(out), *flags, *more]
        monkeypatch.setattr(sys, "argv", [f"/x/recipes/{name}/experiment.py", *words])
        program.main()
        written.append({path.name: path.read_bytes() for path in out.glob("*.csv")})
    assert written[0] == written[1] != {}


def published(name, table, **wanted):
    """Return the only published row that is as wanted."""
    (row,) = where(read_rows(RECIPES / name / "results" / f"{table}.csv"), **wanted)
    return row
