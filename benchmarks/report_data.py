"""Read network.csv: the latest row per link and method, and the figures derived from it."""

import csv
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.net.names import BASELINES, BF16, FLOOR, PLAIN

Row = dict[str, str]
Key = tuple[str, int, int]

# The largest ratio of bytes that still counts as constant across numbers of ranks.
FLAT = 1.05
# Stands in a table cell for a value that was not measured.
MISSING = "–"


@dataclass(frozen=True)
class Split:
    """The milliseconds of a step, divided into four parts."""

    compute: float
    encode: float
    sockets: float
    wait: float


class StepRows:
    """Rows of network.csv by (model, hosts, Mbit/s) and method."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.by_link: dict[Key, dict[str, Row]] = defaultdict(dict)
        for row in self.rows:
            key = (row["model"], int(row["hosts"]), int(row["mbit"]))
            # network.py appends, so the last row of a method is its latest measurement.
            self.by_link[key][row["method"]] = row

    def cell(self, model: str, hosts: int, mbit: int, method: str) -> Row | None:
        return self.by_link.get((model, hosts, mbit), {}).get(method)

    def methods(self) -> list[str]:
        """All methods: baselines first, then specs in the order of the file."""
        found = dict.fromkeys(row["method"] for row in self.rows)
        return [m for m in BASELINES if m in found] + [m for m in found if m not in BASELINES]

    def values(self, part: int) -> list:
        """The distinct models (0), numbers of hosts (1) or Mbit/s (2), sorted."""
        return sorted({key[part] for key in self.by_link})

    def milliseconds(self, model: str, hosts: int, mbit: int, method: str) -> float | None:
        row = self.cell(model, hosts, mbit, method)
        return float(row["step_ms"]) if row else None

    def relative(
        self, model: str, hosts: int, mbit: int, method: str, to: str = PLAIN
    ) -> float | None:
        """Step time divided by that of another method on the same link."""
        own, other = (self.milliseconds(model, hosts, mbit, name) for name in (method, to))
        return own / other if own is not None and other else None

    def time_cell(self, model: str, hosts: int, mbit: int, method: str) -> str:
        """Step time, and in brackets relative to plain DDP and to DDP with the bf16 hook."""
        time = self.milliseconds(model, hosts, mbit, method)
        if time is None:
            return MISSING
        ratios = [self.relative(model, hosts, mbit, method, to) for to in (PLAIN, BF16)]
        shown = [MISSING if ratio is None else f"{ratio:.3f}" for ratio in ratios]
        return f"{time:,.1f} ({', '.join(shown)})"

    def floor(self, model: str, hosts: int, column: str) -> float | None:
        """The median of a column over all `no-op` rows of a model and number of hosts."""
        # Every row, not only the latest: `no-op` sends nothing, so the link does not affect it.
        # The median over all runs then removes most of the machine's other load.
        found = [
            float(row[column])
            for row in self.rows
            if (row["model"], row["hosts"], row["method"]) == (model, str(hosts), FLOOR)
        ]
        return statistics.median(found) if found else None

    def above_floor(self, model: str, hosts: int, mbit: int, method: str) -> float | None:
        """Milliseconds per step above `no-op`, that is, above a step without communication."""
        own = self.milliseconds(model, hosts, mbit, method)
        floor = self.floor(model, hosts, "step_ms")
        return own - floor if own is not None and floor is not None else None

    def split(self, model: str, hosts: int, mbit: int, method: str) -> Split | None:
        """Divide a step into compute, encode, sockets and wait."""
        row = self.cell(model, hosts, mbit, method)
        names = ("step_ms", "user_ms", "system_ms")
        floors = [self.floor(model, hosts, name) for name in names]
        if row is None or None in floors:
            return None
        step, encode, sockets = (
            max(0.0, float(row[name]) - (floor or 0.0))
            for name, floor in zip(names, floors, strict=True)
        )
        compute = float(row["step_ms"]) - step
        # CPU time is summed over threads. Where threads overlap it can exceed the step, so clamp.
        return Split(compute, encode, sockets, max(0.0, step - encode - sockets))

    def payload(self, model: str, hosts: int, method: str) -> float | None:
        """Payload bytes that a rank sends per step: the median over link speeds."""
        return self.median("payload_bytes", model, hosts, method)

    def median(self, column: str, model: str, hosts: int, method: str) -> float | None:
        """The median of a column over link speeds, or None if it is empty."""
        found = [
            float(rows[method][column])
            for (name, count, _), rows in self.by_link.items()
            if (name, count) == (model, hosts) and method in rows and rows[method][column]
        ]
        return statistics.median(found) if found else None


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
