"""What encoding and decoding cost on the CPU, in multiples of the memory floor: encode.csv."""

import math
from dataclasses import dataclass
from pathlib import Path

from report_data import MISSING, Row, read

COLD, WARM = "encode cold", "encode warm"
DECODE, REPEATED = "decode 8", "decode 8 repeated"
_LIMITS = {COLD: 5.5, WARM: 4.5, DECODE: 2.0, REPEATED: 2.0}
_OTHERS = ("add + np.partition", "add + torch.topk", "add + torch.kthvalue", "PowerSGD")


@dataclass(frozen=True)
class Case:
    """The rows of one size of vector and number of entries."""

    n: int
    k: int
    rows: dict[str, Row]

    def multiple(self, what: str) -> float | None:
        """Its time, over that of its unit (the floor, or a pass) in the same run."""
        row = self.rows.get(what)
        return float(row["ms"]) / float(row["of_ms"]) if row else None


def cases(path: Path) -> list[Case]:
    """All that were measured, the smallest first."""
    found: dict[tuple[int, int], dict[str, Row]] = {}
    for row in read(path):
        found.setdefault((int(row["n"]), int(row["k"])), {})[row["what"]] = row
    return [Case(n, k, rows) for (n, k), rows in sorted(found.items())]


def goals(path: Path) -> list[tuple[str, str, str, bool]]:
    """What, the goal, what was measured, and whether it was reached."""
    found = cases(path)
    told = []
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
        told.append((f"`topk` of 0.1 / 1 / 10 %, {what}", goal, shown, met))
    return told


def text(path: Path) -> str:
    found = cases(path)
    if not found:
        return "Not measured yet."
    row = next(iter(found[0].rows.values()))
    return f"""
One process, {_threads(found)} threads, fp32 ({row["device"]}, torch {row["torch"]}, Numba
{row["numba"]}, {row["date"]}). *Encode* is all that error feedback with `topk` does before it
sends: add the residual, select exactly, gather the values, code the indices, take out what is sent;
*cold* without, and *warm* with what the last step left. It is given in multiples of the memory
floor, the time in which 12 bytes per entry are moved at the speed of a copy in the same run; so are
the alternatives. *Decode 8* adds 8 messages up, in multiples of one dense pass over the vector,
both after a new gradient was drawn and the vector set to zero, as in a step; *repeated*, both back
to back with nothing between.
`python benchmarks/encode.py --threads 2 --out benchmarks/results/encode.csv` measures again.
"""


def table(path: Path) -> tuple[list[str], list[list[str]]]:
    """Heads and cells."""
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
