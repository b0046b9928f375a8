"""Write the tables of docs/doctor.md from doctor.csv.

python -m benchmarks.report_doctor           # write them
python -m benchmarks.report_doctor --check   # exit 1 if the page differs
"""

import statistics
from pathlib import Path

from benchmarks.marked_page import MarkedPage, distinct, machine
from benchmarks.report import markdown
from benchmarks.report_data import Row, read


def tables(results: Path) -> str:
    """Return the tables and the conditions, or what is not measured yet."""
    latest = list({row["case"]: row for row in read(results / "doctor.csv")}.values())
    faults = [row for row in latest if row["kind"] == "fault"]
    healthy = [row for row in latest if row["kind"] == "healthy"]
    if not latest:
        return ""
    found = sum(row["passed"] == "True" for row in faults)
    quiet = sum(row["passed"] == "True" for row in healthy)
    return "\n\n".join(
        [
            markdown(_FAULTS, [_fault(row) for row in faults]),
            f"Found: {found} of {len(faults)}. Healthy jobs without a finding: {quiet} of "
            f"{len(healthy)}.",
            markdown(_HEALTHY, _healthy(healthy)),
            _conditions(latest),
        ]
    )


_FAULTS = ["planted", "ranks", "link, Mbit/s", "found, and its ranks", "exit status", "seconds"]


def _fault(row: Row) -> list[str]:
    return [row["case"], row["ranks"], _link(row), row["found"], row["status"], row["doctor_s"]]


_HEALTHY = ["healthy", "jobs", "findings", "seconds, median"]


def _healthy(rows: list[Row]) -> list[list[str]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        where = f"hosts, {row['mbit']} Mbit/s" if int(row["mbit"]) else "loopback"
        groups.setdefault(where, []).append(row)
    return [
        [
            where,
            str(len(group)),
            "; ".join(row["found"] for row in group if row["found"]) or "none",
            f"{statistics.median(float(row['doctor_s']) for row in group):.0f}",
        ]
        for where, group in groups.items()
    ]


def _link(row: Row) -> str:
    return row["mbit"] if int(row["mbit"]) else "loopback"


def _conditions(rows: list[Row]) -> str:
    loads = sorted(float(row["load"]) for row in rows)
    return (
        f"Measured on {distinct(rows, 'date')} {machine(rows)}. Other programs used the cores as "
        f"well: the load was {loads[0]:.0f} to {loads[-1]:.0f}."
    )


PAGE = MarkedPage("doctor", "doctor.md", tables)

if __name__ == "__main__":
    PAGE.main(__doc__)
