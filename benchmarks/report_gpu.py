"""The section on GPUs, from gpu-*.csv: what was measured on each, or that no GPU has run it yet."""

from pathlib import Path

from benchmarks.net.names import FLOOR, PLAIN
from benchmarks.report_data import MISSING, Row, read

# The goals: the largest multiple of the floor at n = 25e6 and 1 %.
_LIMITS = {"encode warm": 1.6, "step of 8": 2.0, "step of 64": 2.5}
_GOAL = ("25000000", "250000")

Tables = list[tuple[str, list[str], list[list[str]]]]


def devices(results: Path) -> dict[str, list[Row]]:
    """The latest rows of each GPU, in the order of its file."""
    found = {}
    for path in sorted(results.glob("gpu-*.csv")):
        # gpu/__main__.py appends, so the last row of a measurement is its latest.
        names = ("part", "model", "what", "n", "k", "form", "ranks")
        latest = {tuple(row[name] for name in names): row for row in read(path)}
        if latest:
            found[next(iter(latest.values()))["device"]] = list(latest.values())
    return found


def text(results: Path) -> str:
    """The section's introduction: how to measure, and the meaning of the tables."""
    if not devices(results):
        return """
**No GPU has run torchcomp yet.** Nothing on this page was measured on one. On a machine with a GPU,
one command runs the tests for GPUs, measures all that this section shows, and takes less than 10
minutes:

```
make gpu
```
"""
    return f"""
Measure it again with `make gpu`.

| word | meaning |
| --- | --- |
| floor | time to move 12 bytes per entry, at the speed of a copy in the same run: what error \
feedback with `topk` must read and write |
| encode | add the residual, select exactly, code, pack with a checksum, subtract. Warm: with the \
scratch of the step before |
| decode 8 | check 8 frames and add up their messages |
| step of 8 | encode warm, and decode 8 |
| GPU | median time on the GPU with empty caches, while launches are queued ahead |
| CPU | time of the thread that launches, with an idle GPU |
| waits | how often the host waits for the GPU: for each bucket, and at the end of the step |
| alone | GPU time of a step's exchange while nothing else runs |
| hidden | share of it that does not lengthen the step, compared with `{FLOOR}` |
"""


def sections(results: Path) -> Tables:
    """Of each GPU: its kernels, its methods, and its training steps. A title, heads and cells."""
    found: Tables = []
    for device, rows in devices(results).items():
        parts = {part: [r for r in rows if r["part"] == part] for part in ("kernel", "method")}
        steps = [row for row in rows if row["part"] == "step"]
        first = rows[0]
        versions = f"torch {first['torch']}, CUDA {first['cuda']}, Triton {first['triton']}"
        conditions = f"### {device}\n\n{versions}, {first['date'][:10]}, {first['revision']}."
        found.append((conditions, *_kernels(parts["kernel"])))
        found.append(("One bucket of 25 MiB:", *_methods(parts["method"])))
        for model, ranks in dict.fromkeys((row["model"], row["ranks"]) for row in steps):
            alike = [row for row in steps if (row["model"], row["ranks"]) == (model, ranks)]
            title = f"Training steps of {model}, bf16 autocast, NCCL, GPUs: {ranks}."
            found.append((title, *_steps(alike)))
    return [entry for entry in found if entry[2]]


def goals(results: Path) -> list[tuple[str, str, str, bool]]:
    """One row per goal and GPU: subject, goal, measured value, and whether it was reached."""
    found = []
    for device, rows in devices(results).items():
        for row in rows:
            limit = _LIMITS.get(row["what"])
            if row["part"] == "kernel" and row["form"] == "fast" and limit:
                multiple = _multiple(row)
                if (row["n"], row["k"]) == _GOAL:
                    goal = f"{device}, n = 25e6: at most {limit} × the memory floor"
                    measured = f"{multiple:.2f}"
                    found.append(
                        (f"`topk(0.01)`, {row['what']}", goal, measured, multiple <= limit)
                    )
    return found


def _multiple(row: Row) -> float:
    return float(row["gpu_ms"]) / float(row["floor_ms"])


def _kernels(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    heads = ["kernels", "n", "k", "form", "GPU, ms", "GB/s", "times the floor"]
    cells = []
    for row in rows:
        size = [f"{int(row['n']):,}", f"{int(row['k']):,}", row["form"]]
        figures = [f"{float(row['gpu_ms']):.3f}", f"{float(row['gb_s']):,.0f}"]
        cells.append([row["what"], *size, *figures, f"{_multiple(row):.2f}"])
    return heads, cells


def _methods(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    heads = ["method", "ranks", "GPU, ms", "CPU, µs", "launches", "waits"]
    cells = []
    for row in rows:
        waits = f"{row['waits']} + {row['waits_per_step']}"
        figures = [f"{float(row['gpu_ms']):.3f}", f"{float(row['cpu_us']):,.0f}"]
        cells.append(
            [f"`{row['what']}`", row["ranks"], *figures, row["launches"] or MISSING, waits]
        )
    return heads, cells


def _steps(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    heads = ["method", "step, ms", "relative to plain DDP", "alone, ms", "hidden"]
    plain = next((float(row["step_ms"]) for row in rows if row["what"] == PLAIN), None)
    cells = []
    for row in rows:
        step = float(row["step_ms"])
        ratio = f"{step / plain:.3f}" if plain else MISSING
        alone, hidden = row["gpu_ms"] or MISSING, MISSING
        if row["hidden"]:
            hidden = f"{min(1.0, max(0.0, float(row['hidden']))):.0%}"
        cells.append([f"`{row['what']}`", f"{step:.2f}", ratio, alone, hidden])
    return heads, cells
