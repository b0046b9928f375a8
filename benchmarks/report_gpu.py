"""The section on GPUs, from gpu-*.csv: what was measured on each, or that no GPU has run it yet."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.marked_page import distinct
from benchmarks.net.names import BASELINES, FLOOR, PLAIN, POWERSGD
from benchmarks.report_data import MISSING, Row, read

# The goals. Of kernels: the largest multiple of the floor at n = 25e6 and 1 %.
_KERNELS = {"encode warm": 1.6, "step of 8": 2.5, "step of 64": 6.0}
_SIZE = ("25000000", "250000")
_BOTH_WAYS = 'bidirectional(topk(0.01), topk(0.01), selection="shard")'
# Of a step on one GPU: the largest multiple of the step of another method.
_STEPS = {
    "mean": (1.03, PLAIN),
    'ef(cast("bf16"))': (1.03, PLAIN),
    "ef(topk(0.01))": (1.10, PLAIN),
    'bidirectional(quantize("int8"), quantize("int8"))': (1.10, PLAIN),
    'bidirectional(quantize("int4"), quantize("int4"))': (1.10, PLAIN),
    _BOTH_WAYS: (1.12, PLAIN),
    "powersgd(rank=1)": (1.00, POWERSGD),
}
_OF_MODEL = {("vit_b_16", _BOTH_WAYS): (1.15, PLAIN)}
# Of the calling thread: microseconds for a bucket.
_HOST = {"ef(topk(0.01))": 150, _BOTH_WAYS: 250}

_VERSIONS = (("torch", "torch"), ("CUDA", "cuda"), ("Triton", "triton"))
_BEFORE = "a01cff8"
"""The last revision whose step decided everything anew for every bucket."""

Table = tuple[str, list[str], list[list[str]]]
Tables = list[Table]
Goal = tuple[str, str, str, bool]
"""Subject, goal, measured value, and whether it was reached."""


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
Measure it again with `make gpu`. [cuda.md](cuda.md#what-ran-on-a-gpu) says what ran and what did
not. A step on one GPU has no network: it shows what a method costs, not what it saves.

| word | meaning |
| --- | --- |
| floor | time to move 12 bytes per entry, at the speed of a copy in the same run: what error \
feedback with `topk` must read and write |
| encode | add the residual, select exactly, code, subtract. Warm: with the threshold of the step \
before |
| decode 8 | check the headers of 8 frames and average their messages |
| step of 8 | encode warm, and decode 8 |
| GPU | median time on the GPU with empty caches, while launches are queued ahead |
| CPU | time of the thread that launches, with an idle GPU; for a method to average the bucket, \
for a step to begin, average and finish |
| waits | how often the host waits for the GPU as far as torch reports it, which leaves out waits \
for events: for each bucket, and at the end of the step |
| alone | GPU time of a step's exchange while nothing else runs |
| hidden | share of it that does not lengthen the step, compared with `{FLOOR}` |
"""


def sections(results: Path) -> Tables:
    """Of each GPU: its kernels, methods, host and training steps. A title, heads and cells."""
    found: Tables = []
    for device, rows in devices(results).items():
        (title, *first), *others = (table for table in _tables(rows) if table[2])
        found.append((f"### {device}\n\n{_conditions(rows)}\n\n{title}", *first))
        found += others
    return found


def _tables(rows: list[Row]) -> Iterator[Table]:
    kernels, buckets, host, steps = (
        [row for row in rows if row["part"] == part]
        for part in ("kernel", "method", "host", "step")
    )
    yield "Kernels:", *_kernels(kernels)
    yield "One bucket of 25 MiB:", *_methods(buckets)
    yield "A whole step with one bucket of 25 MiB:", *_hosts(host)
    for model, ranks in dict.fromkeys((row["model"], row["ranks"]) for row in steps):
        alike = [row for row in steps if (row["model"], row["ranks"]) == (model, ranks)]
        yield f"Training steps of {model}, bf16 autocast, NCCL, GPUs: {ranks}.", *_steps(alike)


def goals(results: Path) -> list[Goal]:
    """All goals of each GPU for which there are rows."""
    return [
        (subject, f"{device}, {goal}", measured, reached)
        for device, rows in devices(results).items()
        for find in (_kernel_goals, _step_goals, _host_goals)
        for subject, goal, measured, reached in find(rows)
    ]


def _kernel_goals(rows: list[Row]) -> Iterator[Goal]:
    for row in rows:
        limit = _KERNELS.get(row["what"])
        kernel = row["part"] == "kernel" and row["form"] == "fast"
        if limit and kernel and (row["n"], row["k"]) == _SIZE:
            multiple = _multiple(row)
            goal = f"n = 25e6: at most {limit} × the memory floor"
            yield f"`topk(0.01)`, {row['what']}", goal, f"{multiple:.2f}", multiple <= limit


def _step_goals(rows: list[Row]) -> Iterator[Goal]:
    steps = {
        (row["model"], row["what"]): float(row["step_ms"])
        for row in rows
        if row["part"] == "step" and row["ranks"] == "1"
    }
    for (model, spec), milliseconds in steps.items():
        limit, other = _OF_MODEL.get((model, spec), _STEPS.get(spec, (None, "")))
        base = steps.get((model, other))
        if limit and base:
            ratio = milliseconds / base
            goal = f"{model}: a step takes at most {limit:.2f} × that of `{other}`"
            yield f"`{spec}`", goal, f"{ratio:.3f} ×", ratio <= limit


def _host_goals(rows: list[Row]) -> Iterator[Goal]:
    for row in rows:
        if row["part"] == "host" and row["what"] in _HOST:
            limit, measured = _HOST[row["what"]], float(row["cpu_us"])
            goal = f"{row['ranks']} ranks: at most {limit} µs of the host for a bucket of 25 MiB"
            yield f"`{row['what']}`", goal, f"{measured:,.0f} µs", measured <= limit


def _conditions(rows: list[Row]) -> str:
    versions = (f"{name} {distinct(rows, key)}" for name, key in _VERSIONS)
    text = f"{', '.join(versions)}, {distinct(rows, 'date')}, revision {distinct(rows, 'revision')}"
    rewritten = {row["revision"] for row in rows} != {_BEFORE}
    since = "" if rewritten else ", before the step was rewritten; not measured again since"
    return f"{text}{since}."


def _multiple(row: Row) -> float:
    return float(row["gpu_ms"]) / float(row["floor_ms"])


def _kernels(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    heads = ["kernel", "n", "k", "form", "GPU, ms", "GB/s", "times the floor"]
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


def _hosts(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    heads = ["method", "ranks", "CPU, µs"]
    return heads, [[f"`{row['what']}`", row["ranks"], f"{int(row['cpu_us']):,}"] for row in rows]


def _steps(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    heads = ["method", "step, ms", "quartiles", "relative to plain DDP", "alone, ms", "hidden"]
    plain = next((float(row["step_ms"]) for row in rows if row["what"] == PLAIN), None)
    cells = []
    for row in sorted(rows, key=lambda row: row["what"] not in BASELINES):
        step = float(row["step_ms"])
        quartiles = " to ".join(f"{float(row[f'step_ms_{end}']):.1f}" for end in ("low", "high"))
        ratio = f"{step / plain:.3f}" if plain else MISSING
        alone, hidden = row["gpu_ms"] or MISSING, MISSING
        if row["hidden"]:
            hidden = f"{min(1.0, max(0.0, float(row['hidden']))):.0%}"
        cells.append([f"`{row['what']}`", f"{step:.2f}", quartiles, ratio, alone, hidden])
    return heads, cells
