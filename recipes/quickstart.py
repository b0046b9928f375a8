"""Two ranks on this machine train a small CNN on real digits three ways, and a table compares them.

    python -m recipes.quickstart

Dense, compressed gradients with error feedback, and local steps with the Quadratic Synchronization
Rule: same data, seed and epochs. Writes ``runs/quickstart/accuracy.png``. ``--seeds 5`` repeats
everything with five seeds and prints mean and standard deviation.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_RANKS = 2
_EPOCHS = 12  # half of the configuration's: enough for all three methods
_TIMEOUT_SECONDS = 180
METHODS = {
    "dense": [],
    "ef(topk(0.01))": ["--compress", "ef(topk(0.01))"],
    "QSR": ["--sync", "qsr(alpha=0.2, h_base=4)"],
}


@dataclass(frozen=True)
class Result:
    """One finished run: its summary and its accuracy along the way."""

    summary: dict[str, Any]
    curve: list[tuple[int, float]]


def main() -> None:
    """Run everything and show what came out."""
    arguments = parse(sys.argv[1:])
    started = time.monotonic()
    results: dict[str, list[Result]] = {name: [] for name in METHODS}
    for seed in range(arguments.seeds):
        for name in METHODS:
            folder = arguments.out / f"seed{seed}" / name.partition("(")[0].lower()
            print(f"\n== {name}, seed {seed}", flush=True)
            results[name].append(run(name, seed, folder, arguments.extra))
    picture = arguments.out / "accuracy.png"
    draw(results, picture)
    print(f"\n{table(results)}\n")
    print(f"QSR is {METHODS['QSR'][1]}")
    print("bytes: what each rank sends; less: than dense training")
    print(f"picture: {picture}")
    print(f"all together: {time.monotonic() - started:.0f} s")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=1, help="repeat with this many seeds [1]")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("extra", nargs="*", help="after --: further flags of recipes.train")
    parsed = parser.parse_args(arguments)
    if parsed.seeds < 1:
        parser.error(f"--seeds must be at least 1, found {parsed.seeds}")
    return parsed


def run(name: str, seed: int, folder: Path, extra: list[str]) -> Result:
    """Train once on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(_RANKS), "-m", "recipes.train"]
    command += ["--config", str(_HERE / "configs" / "digits.yaml"), *METHODS[name]]
    command += ["--epochs", str(_EPOCHS), "--seed", str(seed), "--out", str(folder), *extra]
    if call(command, _environment()) != 0:
        sys.exit(f"error: the run {name!r} failed; its own message is above")
    return read(folder)


def _environment() -> dict[str, str]:
    # torchrun prints a warning where this is missing; the recipe sets its threads itself. Idle
    # threads that spin take the cores from the other rank.
    return {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **os.environ}


def call(command: list[str], environment: dict[str, str]) -> int:
    """Run ``command``; if it takes too long or we are interrupted, torchrun ends its ranks."""
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait(timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"error: no end after {_TIMEOUT_SECONDS} s", file=sys.stderr)
        return 1
    finally:
        process.terminate()
        process.wait()


def read(folder: Path) -> Result:
    """Read what a run left in its folder."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [(x["bytes_sent"], x["test_accuracy"]) for x in lines if "test_accuracy" in x]
    return Result(json.loads((folder / "summary.json").read_text()), curve)


def table(results: dict[str, list[Result]]) -> str:
    """Return the comparison as text, at most 60 columns wide."""
    rows = [("method", "accuracy", "bytes per step", "syncs", "less")]
    for name, runs in results.items():
        first = runs[0].summary
        saved = first["dense_bytes_per_step"] / first["bytes_per_step"]
        syncs, sent = first["synchronisations"], first["bytes_per_step"]
        rows.append((name, accuracy(runs), f"{sent:,.0f}", f"{syncs:,}", f"{saved:.1f}x"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_row(row, widths) for row in rows)


def _row(cells: tuple[str, ...], widths: list[int]) -> str:
    name, *numbers = [
        cell.rjust(width) if place else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join([name, *numbers])


def accuracy(runs: list[Result]) -> str:
    """Return the accuracy of the runs, in per cent, with its deviation where there are several."""
    values = [100 * run.summary["test_accuracy"] for run in runs]
    if len(values) == 1:
        return f"{values[0]:.1f} %"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} %"


def draw(results: dict[str, list[Result]], path: Path) -> None:
    """Draw test accuracy against the bytes that a rank has sent, on a log axis."""
    # Late, because torch comes with it, and the runs that come first need none here.
    from recipes.result_files import pyplot, save_figure

    figure, axes = pyplot().subplots(figsize=(8, 5), layout="constrained")
    for place, (name, runs) in enumerate(results.items()):
        _draw_method(axes, name, runs, f"C{place}", "osD"[place])
    _label_axes(axes)
    save_figure(figure, path, dpi=120)


def _draw_method(axes: Any, name: str, runs: list[Result], color: str, marker: str) -> None:
    for run in runs:
        megabytes = [sent / 1e6 for sent, _ in run.curve]
        percent = [100 * value for _, value in run.curve]
        axes.plot(megabytes, percent, color=color, linewidth=2, alpha=len(runs) ** -0.5)
    end = (megabytes[-1], statistics.mean(100 * run.curve[-1][1] for run in runs))
    axes.plot(*end, marker, color=color, markersize=10)
    # Above the line of 100 %, where no curve can run through the words.
    axes.annotate(
        f"{name}\n{accuracy(runs)}\n{end[0]:.3g} MB",
        (end[0], 101.5),
        horizontalalignment="center",
        verticalalignment="bottom",
        color=color,
        fontweight="bold",
    )


def _label_axes(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("MB sent by each rank since the start (log scale)")
    axes.set_ylabel("test accuracy, %")
    axes.set_title("Accuracy against traffic: handwritten digits, 2 ranks")
    axes.grid(True, which="major", alpha=0.3)
    axes.margins(x=0.12)
    lowest = min(axes.get_ylim()[0], 90)
    axes.set_yticks(range(round(lowest / 10) * 10, 101, 10))
    axes.set_ylim(lowest, 100 + (100 - lowest) * 0.3)


if __name__ == "__main__":
    main()
