"""Write the table of docs/auto.md from auto.csv.

python -m benchmarks.report_auto           # write it
python -m benchmarks.report_auto --check   # exit 1 if the page differs
"""

from collections import defaultdict
from pathlib import Path

from benchmarks.marked_page import MarkedPage, machine
from benchmarks.report import markdown
from benchmarks.report_data import Row, read


def tables(results: Path) -> str:
    """Return the table and its conditions; nothing if nothing is measured."""
    links: dict[str, dict[str, Row]] = defaultdict(dict)
    rows = read(results / "auto.csv")
    for row in rows:
        name = f"{row['hosts']} hosts, {int(row['mbit']):,} Mbit/s, {row['model']}"
        links[name][row["method"]] = row
    if not links:
        return ""
    busy = [float(row["other_cores"]) for row in rows]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    return (
        "Milliseconds per step: in the trial/alone afterwards. *Chosen / best* is of steps "
        "alone.\n\n"
        + markdown(
            ["link, model", *(f"`{method}`" for method in methods), "chosen", "chosen / best"],
            [[name, *_line(found, methods)] for name, found in links.items()],
        )
        + "\n\nMedians, 16 images per rank, 0.5 ms, gloo. Hosts share the cores, of which other "
        f"programs kept {min(busy)} to {max(busy)} busy; {machine(rows)}."
    )


def _line(found: dict[str, Row], methods: list[str]) -> list[str]:
    chosen = found[next(iter(found.values()))["chosen"]]
    best = min(float(row["step_ms"]) for row in found.values())
    times = [
        f"{float(found[each]['trial_ms']):.1f}/{float(found[each]['step_ms']):.1f}"
        for each in methods
    ]
    return [*times, f"`{chosen['method']}`", f"{float(chosen['step_ms']) / best:.2f}"]


PAGE = MarkedPage("auto", "auto.md", tables)

if __name__ == "__main__":
    PAGE.main(__doc__)
