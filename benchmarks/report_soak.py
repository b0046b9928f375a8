"""Write the tables of docs/reliability.md from soak.csv and mutations.csv.

python -m benchmarks.report_soak           # write them
python -m benchmarks.report_soak --check   # exit 1 if the page differs
"""

from pathlib import Path

from benchmarks.marked_page import MarkedPage, distinct, machine
from benchmarks.report import markdown
from benchmarks.report_data import Row, read


def tables(results: Path) -> str:
    """Return both tables and the conditions; nothing if nothing is measured."""
    trained, mutated = (_latest(results / f"{name}.csv") for name in ("soak", "mutations"))
    parts = [
        markdown(_TRAINED, [_trained(row) for row in trained]),
        markdown(_MUTATED, [_mutated(row) for row in mutated]),
        _conditions([*trained, *mutated]),
    ]
    return "\n\n".join(filter(None, parts))


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

    minutes = sum(float(row["seconds"]) for row in rows) / 60
    return f"Measured on {distinct(rows, 'date')} in {minutes:.0f} minutes, {machine(rows)}."


PAGE = MarkedPage("soak", "reliability.md", tables)

if __name__ == "__main__":
    PAGE.main(__doc__)
