"""What the command lines of the benchmarks have in common."""

import argparse
from pathlib import Path

_HERE = Path(__file__).parent


def table_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser for a program that adds rows to tables, with ``--resume`` and ``--out``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--resume", action="store_true", help="skip what already has a row")
    parser.add_argument("--out", type=Path, help="folder for the CSV files [benchmarks/results]")
    return parser


def table_folder(quick: bool, name: str) -> Path:
    """Return the default of ``--out``. A quick run must not add rows to the committed results."""
    return _HERE.parent / "runs" / name if quick else _HERE / "results"
