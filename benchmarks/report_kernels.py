"""The section on kernels, from encode.csv: times as multiples of the memory floor."""

import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report_data import MISSING, Row, read

COLD, WARM = "encode cold", "encode warm"
DECODE, REPEATED = "decode 8", "decode 8 repeated"
# The goals: the largest multiple of the floor (encode) or of the dense pass (decode).
_LIMITS = {COLD: 5.5, WARM: 4.5, DECODE: 2.0, REPEATED: 2.0}
_OTHERS = ("add + np.partition", "add + torch.topk", "add + torch.kthvalue", "PowerSGD")


@dataclass(frozen=True)
class Case:
    """The rows of one vector size and one number of kept entries."""

    n: int
    k: int
    rows: dict[str, Row]

    def multiple(self, what: str) -> float | None:
        """The time divided by that of its unit (the floor or a pass) in the same run."""
        row = self.rows.get(what)
        return float(row["ms"]) / float(row["of_ms"]) if row else None


def cases(path: Path) -> list[Case]:
    """All measured cases, the smallest first."""
    found: dict[tuple[int, int], dict[str, Row]] = {}
    for row in read(path):
        found.setdefault((int(row["n"]), int(row["k"])), {})[row["what"]] = row
    return [Case(n, k, rows) for (n, k), rows in sorted(found.items())]


def goals(path: Path) -> list[tuple[str, str, str, bool]]:
    """One row per goal: subject, goal, measured values, and whether it was reached."""
    found = cases(path)
    rows = []
    for what, limit in _LIMITS.items() if found else ():
        unit = "dense pass" if what in (DECODE, REPEATED) else "memory floor"
        goal = f"CPU, {_threads(found)} threads: at most {limit:g} × the {unit}"
        by_size: dict[int, list[float]] = {}
        for case in found:
            by_size.setdefault(case.n, []).append(case.multiple(what) or math.inf)
        shown = "; ".join(
            f"n = {n:,}: {' / '.join(f'{value:.1f}' for value in values)}"
            for n, values in by_size.items()
        )
        met = all(value <= limit for values in by_size.values() for value in values)
        rows.append((f"`topk` of 0.1 / 1 / 10 %, {what}", goal, shown, met))
    return rows


def text(path: Path) -> str:
    """The section's introduction: conditions, and the meaning of the columns."""
    found = cases(path)
    if not found:
        return "Not measured yet."
    # One run of encode.py writes the whole file, so any row has the conditions.
    row = next(iter(found[0].rows.values()))
    return f"""
Time that `topk` takes on the CPU, before it sends and after it receives. Measure it again with:

```
python -m benchmarks.encode --threads 2 --out benchmarks/results/encode.csv
```

Conditions: one process, {_threads(found)} threads, fp32, {row["device"]}, torch
{row["torch"]}, Numba {row["numba"]}, {row["date"]}.

| column | meaning |
| --- | --- |
| floor, ms | time to move 12 bytes per entry, at the speed of a copy in the same run |
| {COLD} | all that error feedback with `topk` does before it sends: add the residual, select \
exactly, gather the values, code the indices, subtract what is sent. No threshold and no workspace \
from an earlier step. A multiple of the floor |
| {WARM} | the same, with the threshold and the workspace of the previous step |
| {DECODE} | add up 8 messages, as a multiple of one dense pass over the vector. Both run after a \
new gradient was drawn and the vector was set to zero, as in a step |
| {REPEATED} | the same, but both are repeated back to back with nothing in between |
| {", ".join(_OTHERS)} | alternatives to encoding, as multiples of the floor |
"""


def table(path: Path) -> tuple[list[str], list[list[str]]]:
    """Column heads and cells, one row per case."""
    heads = ["n", "k", "floor, ms", COLD, WARM, DECODE, REPEATED, *_OTHERS]
    rows = []
    for case in cases(path):
        floor = float(case.rows["floor"]["ms"])
        values = [case.multiple(what) for what in heads[3:]]
        cells = [MISSING if value is None else f"{value:.1f}" for value in values]
        rows.append([f"{case.n:,}", f"{case.k:,}", f"{floor:.3f}", *cells])
    return heads, rows


def _threads(found: list[Case]) -> str:
    return next(iter(found[0].rows.values()))["threads"]
