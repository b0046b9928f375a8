"""CSV files of results. Each row is written as soon as it is measured."""

import csv
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from recipes.result_files import revision

_COMMON = ["date", "revision", "torch", "device", "cpus"]
_RUN = ["hosts", "mbit", "delay_us", "model", "parameters", "batch", "method"]
_STEP = ["steps", "step_ms", "step_ms_low", "step_ms_high", "user_ms", "system_ms"]
# collective_ms is empty in new rows: the time in blocking collectives is no longer measured.
_STEP += ["collective_ms", "wire_bytes", "packets", "payload_bytes", "tcp_bytes", "counted_bytes"]
STEPS = [*_COMMON, *_RUN, *_STEP]
NODES = [*_COMMON, "ranks", "levels", *_RUN, *_STEP, "inside_bytes", "counted_inside_bytes"]
ACCURACY = [*_COMMON, *_RUN, "rate", "seed", "target", "reached", "accuracy", "steps", "seconds"]
ACCURACY += ["wire_bytes", "payload_bytes"]
PREDICTIONS = [*_COMMON, "ranks", "levels", *_RUN, "steps", "step_ms", "step_ms_low"]
PREDICTIONS += ["step_ms_high", "compute_ms", "predicted_ms", "hook_ms", "formula_ms"]
PREDICTIONS += ["other_cores"]
SOAK = [*_COMMON, "part", "method", "ranks", "steps", "step_ms", "seconds"]
SOAK += ["swaps", "loads", "samples"]
SOAK += ["resident_mib", "growth_kib", "trend", "descriptors", "threads", "equal", "lost", "unsent"]
SOAK += ["passed"]
MUTATIONS = [*_COMMON, "part", "seed", "cases", "problems", "slowest_ms", "results", "seconds"]
MUTATIONS += ["passed"]


class TableError(ValueError):
    """A CSV file cannot take the rows of this program."""


class Table:
    """One CSV file. Rows are appended, never changed.

    Raises:
        TableError: if the file has other columns.
    """

    def __init__(self, path: Path, columns: list[str]) -> None:
        self.path, self.columns = path, columns
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = self.read()
        if rows and list(rows[0]) != columns:
            raise TableError(
                f"cannot add rows to {path}, whose columns are {', '.join(rows[0])}; expected "
                f"{', '.join(columns)}. Choose another folder with --out"
            )

    def read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))

    def add(self, row: dict[str, Any]) -> None:
        # Open and close for every row: an interrupted run then loses no result, and --resume can
        # continue from the file.
        fresh = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerow(row)

    def has(self, **wanted: Any) -> bool:
        """Whether a row has all of these values."""
        # CSV stores text, so compare as text.
        texts = {name: str(value) for name, value in wanted.items()}
        return any(all(row[name] == text for name, text in texts.items()) for row in self.read())


def step_times(ranks: Sequence[Mapping[str, Any]]) -> list[float]:
    """The seconds of each step: the mean over the ranks."""
    return [statistics.mean(step) for step in zip(*(rank["times"] for rank in ranks), strict=True)]


def step_columns(times: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles of the seconds of steps, in milliseconds."""
    # statistics.quantiles raises for a single value.
    each = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [*times] * 3
    names = ("step_ms_low", "step_ms", "step_ms_high")
    return {name: milliseconds(seconds) for name, seconds in zip(names, each, strict=True)}


def milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def conditions() -> dict[str, Any]:
    """The columns that record when, where and with which versions a row was measured."""
    from importlib.metadata import version

    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "revision": revision(),
        "torch": version("torch"),
        "device": processor(),
        "cpus": len(os.sched_getaffinity(0)),
    }


def processor() -> str:
    """The name of the CPU."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
