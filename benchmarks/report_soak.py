"""Write the tables of docs/reliability.md from soak.csv and mutations.csv.

python -m benchmarks.report_soak           # write them
python -m benchmarks.report_soak --check   # exit 1 if the page differs
"""

import argparse
import re
import sys
from pathlib import Path

from benchmarks.report import markdown
from benchmarks.report_data import Row, read

_ROOT = Path(__file__).parents[1]
RESULTS = _ROOT / "benchmarks" / "results"
PAGE = _ROOT / "docs" / "reliability.md"
_MARKED = re.compile(r"(<!-- soak -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    check, page = parser.parse_args().check, PAGE.read_text()
    text = filled(page, RESULTS)
    if not check:
        PAGE.write_text(text)
    elif text != page:
        sys.exit("docs/reliability.md differs: run python -m benchmarks.report_soak")


def filled(page: str, results: Path) -> str:
    """Return the page with the tables between its marks written again."""
    return _MARKED.sub(lambda match: f"{match[1]}{tables(results)}\n{match[2]}", page)


def tables(results: Path) -> str:
    """Return both tables and the conditions, or what is not measured yet."""
    trained, mutated = (_latest(results / f"{name}.csv") for name in ("soak", "mutations"))
    parts = [
        markdown(_TRAINED, [_trained(row) for row in trained]),
        markdown(_MUTATED, [_mutated(row) for row in mutated]),
        _conditions([*trained, *mutated]),
    ]
    return "\n\n".join(filter(None, parts)) or "Not measured yet."


def _latest(path: Path) -> list[Row]:
    """The last row of each part."""
    return list({row["part"]: row for row in read(path)}.values())


_TRAINED = [
    "training",
    "method",
    "ms per step",
    "memory, KiB",
    "bytes per step",
    "descriptors, threads",
    "replicas equal",
    "lost",
    "unsent",
]


def _trained(row: Row) -> list[str]:
    return [
        row["part"],
        f"`{row['method']}`",
        row["step_ms"],
        f"{float(row['growth_kib']):+.0f}",
        f"{float(row['trend']):+.1f}",
        f"{row['descriptors']}, {row['threads']}",
        f"{row['equal']} of {row['samples']}",
        f"{float(row['lost']):.0e}",
        f"{float(row['unsent']):.0e}" if float(row["unsent"]) else "0",
    ]


_MUTATED = ["mutated", "cases", "results", "problems", "slowest, ms"]


def _mutated(row: Row) -> list[str]:
    counts = [each.rpartition(": ") for each in row["results"].split("; ")]
    results = ", ".join(f"{name} {int(count):,}" for name, _, count in counts)
    return [row["part"], f"{int(row['cases']):,}", results, row["problems"], row["slowest_ms"]]


def _conditions(rows: list[Row]) -> str:
    if not rows:
        return ""

    def distinct(column: str) -> str:
        return ", ".join(sorted({row[column].partition("T")[0] for row in rows}))

    minutes = sum(float(row["seconds"]) for row in rows) / 60
    return (
        f"Measured on {distinct('date')} in {minutes:.0f} minutes, on {distinct('device')} with "
        f"{distinct('cpus')} cores, torch {distinct('torch')}, revision {distinct('revision')} "
        "(+: with uncommitted changes)."
    )


if __name__ == "__main__":
    main()
