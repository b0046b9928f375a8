"""What the command lines of the benchmarks have in common."""

import argparse
from pathlib import Path

_HERE = Path(__file__).parent


def table_parser(description: str | None, quick: str) -> argparse.ArgumentParser:
    """Return a parser for a program that adds rows to tables; `quick` is the help of --quick."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--resume", action="store_true", help="skip what already has a row")
    parser.add_argument("--out", type=Path, help="folder for the CSV files [benchmarks/results]")
    return parser


def parsed_by(parser: argparse.ArgumentParser, words: list[str], name: str) -> argparse.Namespace:
    """Parse `words`. A quick run must not add rows to the committed results: it has its folder."""
    parsed = parser.parse_args(words)
    folder = _HERE.parent / "runs" / name if parsed.quick else _HERE / "results"
    parsed.out = parsed.out or folder
    return parsed
