"""Write the tables of docs/guard.md from guard_faults.csv, guard_clean.csv and guard_cost.csv.

python -m benchmarks.report_guard           # write them
python -m benchmarks.report_guard --check   # exit 1 if the page differs
"""

from pathlib import Path

from benchmarks.marked_page import MarkedPage, distinct, machine
from benchmarks.report import markdown
from benchmarks.report_data import Row, read


def tables(results: Path) -> str:
    """Return the tables and their conditions; nothing if nothing is measured."""
    faults, clean, cost = (read(results / f"guard_{n}.csv") for n in ("faults", "clean", "cost"))
    parts = [
        *([_faults(faults)] if faults else []),
        *([_clean(clean)] if clean else []),
        *([_cost(cost)] if cost else []),
        _conditions([*faults, *clean, *cost]),
    ]
    return "\n\n".join(filter(None, parts))


def _faults(rows: list[Row]) -> str:
    names = list(dict.fromkeys(row["fault"] for row in rows))
    found = sum(row["passed"] == "True" for row in rows)
    lines = []
    for name in names:
        runs = [row for row in rows if row["fault"] == name]
        right = [row for row in runs if row["passed"] == "True"]
        steps = sorted(int(row["after"]) for row in runs if row["after"])
        lines.append(
            [
                name,
                ", ".join(sorted({kind for row in runs for kind in row["kinds"].split("; ")})),
                f"{len(right)} of {len(runs)}",
                f"{steps[0]} to {steps[-1]}" if steps else "",
            ]
        )
    methods = ", ".join(f"`{each}`" for each in dict.fromkeys(row["method"] for row in rows))
    return (
        f"**Seeded faults**: {found} of {len(rows)} found within 100 steps, with the right kind, "
        "parameter and rank. A small CNN on the digits, 2 and 4 ranks, planted after 20 to 80 "
        f"steps; {methods}. The faults are in "
        "[benchmarks/guard_faults.py](../benchmarks/guard_faults.py).\n\n"
        + markdown(["fault", "alarm", "found", "after, steps"], lines)
    )


def _clean(rows: list[Row]) -> str:
    alarms = sum(int(row["alarms"]) for row in rows)
    comparisons = sum(int(row["comparisons"]) for row in rows)
    lines = [
        [
            f"`{row['flags']}`",
            row["ranks"],
            row["steps"],
            row["alarms"],
            row["accuracy"],
            f"{100 * int(row['control_bytes']) / int(row['bytes']):.2f}",
        ]
        for row in rows
    ]
    header = ["flags", "ranks", "steps", "alarms", "accuracy, %", "control, % of bytes"]
    return (
        f"**Clean runs of the training recipe**: {alarms} alarms in {len(rows)} runs with "
        f"{comparisons} comparisons (`recipes/configs/digits.yaml`, `--guard 50`). *Control* is "
        "all that is not a message, also what runs without the guard send at the end of a step."
        "\n\n" + markdown(header, lines)
    )


def _cost(rows: list[Row]) -> str:
    lines = [
        [
            row["model"],
            f"`{row['method']}`",
            row["every"],
            row["step_ms"],
            row["inside"],
            row["pairs"],
            f"{row['time']} ({row['time_low']} to {row['time_high']})",
            row["bytes"],
        ]
        for row in rows
    ]
    header = ["model", "method", "every", "step, ms", "in the guard, %", "pairs"]
    header += ["more time, % (quartiles)", "more bytes, %"]
    return (
        "**Cost**. The column *every* has the steps from one comparison to the next, and a pair is "
        "that many steps with the guard and without. Medians over pairs, in one process per rank, "
        f"{rows[0]['ranks']} ranks. *In the guard* is the time of the guard itself, its work and "
        "its messages, as a share of the step. Pairs also differ without a guard, by several "
        "percent.\n\n" + markdown(header, lines)
    )


def _conditions(rows: list[Row]) -> str:
    if not rows:
        return ""
    return (
        "`python -m benchmarks.guard --resume`, gloo over loopback, measured on "
        f"{distinct(rows, 'date')} {machine(rows)}."
    )


PAGE = MarkedPage("guard", "guard.md", tables)

if __name__ == "__main__":
    PAGE.main(__doc__)
