"""The tables of docs/performance.md, docs/prediction.md and docs/reliability.md.

Each is a function from the folder of the results to markdown: see recipes/page_tables.py.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.figures import Link, Row, Steps, latest
from benchmarks.net.names import BF16, FLOOR, NAIVE_TOPK, PLAIN, POWERSGD
from recipes.tables import TableMaker, markdown_table

MISSING = "–"
"""Stands for a value that was not measured."""

_NAMES = {
    FLOOR: "no exchange",
    PLAIN: "plain DDP",
    BF16: "DDP's bf16 hook",
    POWERSGD: "DDP's PowerSGD hook",
    NAIVE_TOPK: "naive TopK",
}
_MODEL, _HOSTS = "resnet18", 4
_PER_HOST = ("ranks", "levels", "hosts", "mbit", "model", "method")
_VECTOR = 25_000_000, 250_000
_WHOLE = ("encode", "decode", "step", "add + torch.topk", "quantise", "dequantise")
"""How the names of kernels begin that are not a part of another one."""


def label(method: str) -> str:
    """The name of a method in a table."""
    return _NAMES.get(method, f"`{method}`")


def grid(
    corner: str,
    rows: Iterable[tuple[str, Any]],
    columns: Sequence[tuple[str, Any]],
    cell: Callable[[Any, Any], str | None],
) -> str:
    """Return a table with a cell for each row and column, without those that have none."""
    named = list(rows)
    cells = [[cell(row, column) for _, column in columns] for _, row in named]
    kept = [at for at in range(len(columns)) if any(line[at] for line in cells)]
    lines = [
        [name, *(line[at] or MISSING for at in kept)]
        for (name, _), line in zip(named, cells, strict=True)
        if any(line)
    ]
    return markdown_table([corner, *(columns[at][0] for at in kept)], lines)


def labelled(methods: Iterable[str]) -> list[tuple[str, str]]:
    return [(label(method), method) for method in methods]


def distinct(rows: Iterable[Row], column: str) -> str:
    """All values of a column, dates without the time."""
    return ", ".join(sorted({row[column].partition("T")[0] for row in rows}))


# --- Shaped links ---------------------------------------------------------------------------------


def step_time(results: Path) -> str:
    steps = Steps(results / "network.csv")

    def cell(method: str, mbit: int) -> str | None:
        link = _MODEL, _HOSTS, mbit
        time, relative = steps.milliseconds(link, method), steps.relative(link, method)
        return f"{time:,.0f} ({relative:.3f})" if time and relative else None

    columns = [(f"{mbit:,} Mbit/s", mbit) for mbit in steps.speeds]
    return grid("method", labelled(steps.methods), columns, cell)


def relative(model: str, hosts: Sequence[int], speeds: Sequence[int]) -> TableMaker:
    """The step times of a model over those of plain DDP."""

    def table(results: Path) -> str:
        steps = Steps(results / "network.csv")

        def cell(method: str, link: Link) -> str | None:
            time, relative = steps.milliseconds(link, method), steps.relative(link, method)
            if method == PLAIN:
                return f"{time:,.0f} ms" if time else None
            return f"{relative:.2f}" if relative else None

        links = [(model, n, mbit) for n in hosts for mbit in speeds]
        columns = [(f"{n} hosts, {mbit:,}", (model, n, mbit)) for model, n, mbit in links]
        return grid("method", labelled(steps.methods), columns, cell)

    return table


def nodes(results: Path) -> str:
    found = {
        (row["method"], row["levels"]): row
        for row in latest(results / "nodes.csv", *_PER_HOST)
        if (row["model"], row["hosts"], row["ranks"], row["mbit"]) == (_MODEL, "2", "4", "100")
    }

    def cell(method: str, column: tuple[str, str]) -> str | None:
        name, levels = column
        row = found.get((method, levels))
        if row is None:
            return None
        return f"{float(row[name]):,.0f}" if name == "step_ms" else f"{float(row[name]) / 1e6:.2f}"

    columns = [
        (f"{what}, {count}", (name, levels))
        for what, name in (("MB over the link", "payload_bytes"), ("ms", "step_ms"))
        for count, levels in (("one level", "1"), ("two levels", "2"))
    ]
    methods = figures.in_order(method for method, _ in found if method != FLOOR)
    return grid("method", labelled(methods), columns, cell)


def time_to_accuracy(results: Path) -> str:
    found = figures.times_to_accuracy(results / "time_to_accuracy.csv")
    by_link = {(each.method, each.mbit): each for each in found}

    def cell(method: str, column: tuple[int, str]) -> str | None:
        mbit, text = column
        each = by_link.get((method, mbit))
        return text.format(each) if each else None

    columns = [(f"seconds, {mbit} Mbit/s", (mbit, "{0.seconds:.1f}")) for mbit in (10, 100)]
    columns += [("steps", (10, "{0.steps:.0f}")), ("runs missed", (10, "{0.missed}"))]
    methods = dict.fromkeys(method for method, _ in by_link)
    return grid("method", labelled(methods), columns, cell)


def nbytes(results: Path) -> str:
    """What the kernel counts and, in brackets, that over the bytes of the messages."""
    steps = Steps(results / "network.csv")

    def cell(method: str, column: tuple[str, int]) -> str | None:
        kernel = steps.nbytes("payload_bytes", *column, method)
        messages = steps.nbytes("counted_bytes", *column, method)
        if not kernel:
            return None
        return f"{kernel:,.0f}" + (f" ({kernel / messages:.2f})" if messages else "")

    ends = min(steps.hosts), max(steps.hosts)
    columns = [(f"{model}, {n} hosts", (model, n)) for model in steps.models for n in ends]
    methods = [method for method in steps.methods if method != FLOOR]
    return grid("method", labelled(methods), columns, cell)


def loopback(results: Path) -> str:
    found = figures.loopback_ratios(results / "loopback.csv")
    rows = [
        [label(method), f"{statistics.median(each):.2f}", f"{min(each):.2f}–{max(each):.2f}"]
        for method, each in found.items()
        if method != PLAIN
    ]
    return markdown_table(["method", "median over plain DDP", "range"], rows)


# --- Kernels --------------------------------------------------------------------------------------


def encode(results: Path) -> str:
    found: dict[tuple[int, int], dict[str, Row]] = {}
    for row in figures.read(results / "encode.csv"):
        found.setdefault((int(row["n"]), int(row["k"])), {})[row["what"]] = row

    def cell(size: tuple[int, int], what: str) -> str | None:
        row = found[size].get(what)
        return f"{float(row['ms']) / float(row['of_ms']):.1f}" if row else None

    whats = ("encode cold", "encode warm", "decode 8", "add + torch.topk")
    rows = [(f"{n:,}, {100 * k / n:.0f} %", (n, k)) for n, k in sorted(found) if 100 * k >= n]
    return grid("n, kept", rows, [(what, what) for what in whats], cell)


# --- GPUs -----------------------------------------------------------------------------------------


def each_gpu(table: Callable[[list[Row]], str], *columns: str) -> TableMaker:
    """A table for each GPU that has rows, below its name and the values of some columns."""

    def tables(results: Path) -> str:
        shown = []
        for path in sorted(results.glob("gpu-*.csv")):
            rows = latest(path, "part", "model", "what", "n", "k", "form", "ranks")
            named = (f", {name} {distinct(rows, name)}" for name in columns)
            shown.append(f"{distinct(rows, 'device')}{''.join(named)}:\n\n{table(rows)}")
        return "\n\n".join(shown) or "No GPU has run it yet."

    return tables


def gpu_kernels(rows: list[Row]) -> str:
    """The largest vector, and 1 % of it, in both forms of the kernels."""
    found = {
        (row["what"], row["form"]): row
        for row in rows
        if row["part"] == "kernel" and (int(row["n"]), int(row["k"])) == _VECTOR
    }

    def cell(what: str, form: str) -> str | None:
        row = found.get((what, form))
        if row is None:
            return None
        time = float(row["gpu_ms"])
        return f"{time:.3f} ({time / float(row['floor_ms']):.1f})"

    whats = dict.fromkeys(what for what, _ in found if what.startswith(_WHOLE))
    columns = [("kernels", "fast"), ("plain torch", "torch")]
    return grid("what", [(what, what) for what in whats], columns, cell)


def gpu_buckets(rows: list[Row]) -> str:
    found = {(row["what"], row["part"]): row for row in rows if row["ranks"] == "8"}

    def cell(method: str, column: tuple[str, str, int]) -> str | None:
        part, name, digits = column
        row = found.get((method, part))
        return f"{float(row[name]):,.{digits}f}" if row and row[name] else None

    columns = [
        ("GPU, ms", ("method", "gpu_ms", 2)),
        ("CPU, µs", ("method", "cpu_us", 0)),
        ("CPU of a step, µs", ("host", "cpu_us", 0)),
        ("launches", ("method", "launches", 0)),
    ]
    return grid("method", labelled(dict.fromkeys(method for method, _ in found)), columns, cell)


def gpu_steps(rows: list[Row]) -> str:
    steps = [row for row in rows if row["part"] == "step"]
    found = {(row["what"], row["model"], row["ranks"]): float(row["step_ms"]) for row in steps}

    def cell(method: str, task: tuple[str, str]) -> str | None:
        time, plain = found.get((method, *task)), found.get((PLAIN, *task))
        if time is None:
            return None
        return f"{time:.1f}" + (f" ({time / plain:.2f})" if plain else "")

    tasks = dict.fromkeys((row["model"], row["ranks"]) for row in steps)
    columns = [(f"{model}, GPUs: {ranks}", (model, ranks)) for model, ranks in tasks]
    return grid("method", labelled(figures.in_order(row["what"] for row in steps)), columns, cell)


# --- Predictions ----------------------------------------------------------------------------------


def prediction_methods(results: Path) -> str:
    rows = figures.predictions(results / "predict.csv")
    names = [("all", ""), *labelled(dict.fromkeys(row["method"] for row in rows))]

    def cell(method: str, column: tuple[figures.Estimate, int]) -> str:
        estimate, which = column
        alike = [row for row in rows if method in ("", row["method"])]
        return _median_and_tail(figures.errors(alike, estimate))[which]

    columns = [
        (f"{what}, %, from {name}", (estimate, which))
        for name, estimate in (
            ("measured collectives", figures.predicted),
            ("the link alone", figures.computed),
        )
        for which, what in enumerate(("median", "90th percentile"))
    ]
    return grid("method", names, columns, cell)


def prediction_links(results: Path) -> str:
    rows = figures.predictions(results / "predict.csv")

    def cell(shape: tuple[str, str], mbit: int) -> str | None:
        alike = [r for r in rows if ((r["hosts"], r["ranks"]), int(r["mbit"])) == (shape, mbit)]
        return ", ".join(_median_and_tail(figures.errors(alike))) if alike else None

    shapes = sorted({(r["hosts"], r["ranks"]) for r in rows}, key=lambda s: (int(s[0]), s[1]))
    names = [(h if r == "1" else f"{h} of {r} ranks", (h, r)) for h, r in shapes]
    columns = [(f"{mbit:,} Mbit/s", mbit) for mbit in sorted({int(r["mbit"]) for r in rows})]
    return grid("hosts", names, columns, cell)


def _median_and_tail(errors: Sequence[float]) -> tuple[str, str]:
    return (
        f"{100 * statistics.median(errors):.1f}",
        f"{100 * figures.percentile(errors, 0.9):.1f}",
    )


def prediction_choices(results: Path) -> str:
    found = figures.choices(figures.predictions(results / "predict.csv"))
    close = sum(each.regret <= figures.CLOSE for each in found)
    worst = max((each.regret for each in found), default=1.0)
    heads = ["choices", "at most 5 % slower than the best", "worst over the best"]
    heads += ['right "don\'t"', 'wrong "don\'t"', 'missed "don\'t"']
    return markdown_table(heads, [[len(found), close, f"{worst:.2f}", *figures.dont(found)]])


# --- Soak -----------------------------------------------------------------------------------------


def soak(results: Path) -> str:
    heads = ["training", "method", "ms per step", "memory, KiB", "bytes per step"]
    heads += ["descriptors, threads", "replicas equal", "lost", "unsent"]
    rows = [
        [
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
        for row in latest(results / "soak.csv", "part")
    ]
    return markdown_table(heads, rows)


def mutations(results: Path) -> str:
    rows = []
    for row in latest(results / "mutations.csv", "part"):
        counts = [each.rpartition(": ") for each in row["results"].split("; ")]
        outcomes = ", ".join(f"{name} {int(count):,}" for name, _, count in counts)
        rows.append([row["part"], f"{int(row['cases']):,}", outcomes, row["problems"]])
    return markdown_table(["mutated", "cases", "results", "problems"], rows)


TABLES: dict[str, TableMaker] = {
    "step_time": step_time,
    "more_hosts": relative(_MODEL, (16,), (10, 100, 1000)),
    "small_model": relative("smallcnn", (4, 8, 16), (100, 1000)),
    "nodes": nodes,
    "time_to_accuracy": time_to_accuracy,
    "bytes": nbytes,
    "loopback": loopback,
    "encode": encode,
    "gpu_kernels": each_gpu(gpu_kernels),
    "gpu_buckets": each_gpu(gpu_buckets),
    "gpu_steps": each_gpu(gpu_steps, "torch", "cuda", "triton", "date"),
    "prediction_methods": prediction_methods,
    "prediction_links": prediction_links,
    "prediction_choices": prediction_choices,
    "soak": soak,
    "mutations": mutations,
}
