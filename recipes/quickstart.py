"""Train a small CNN on real digits with several methods, and compare accuracy and traffic.

    python -m recipes.quickstart

Two ranks on this machine train three times, with the same data, seed and epochs: plain DDP,
compressed gradients with error feedback, and local steps with the Quadratic Synchronization Rule.
The program prints a table and writes ``runs/quickstart/accuracy.png``. ``--seeds 0,1,2`` repeats
everything with three seeds and prints mean and standard deviation. Other methods are strings:

    python -m recipes.quickstart --ranks 4 --methods dense 'ef(quantize("int8"))' 'every(8)'
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from recipes.errors import exit_on_user_error
from recipes.experiments import seed_list
from recipes.pictures import MARKERS, Line, Panel, draw
from recipes.result_files import make_folder
from recipes.rows import spread
from torchcomp.local_sgd.schedules import Schedule
from torchcomp.specs.checks import check_count
from torchcomp.specs.spec import parse_any

_CONFIG = Path(__file__).resolve().parent / "configs" / "digits.yaml"
_TIMEOUT_SECONDS = 180
METHODS = ("dense", "ef(topk(0.01))", "qsr(alpha=0.2, h_base=4)")


@dataclass(frozen=True)
class Result:
    """One finished run: its summary, and test accuracy by bytes sent."""

    summary: dict[str, Any]
    curve: list[tuple[int, float]]


def main() -> None:
    with exit_on_user_error():
        arguments = parse(sys.argv[1:])
        flags = {method: flags_of(method) for method in arguments.methods}
        make_folder(arguments.out)
    started = time.monotonic()
    results: dict[str, list[Result]] = {method: [] for method in flags}
    for seed in arguments.seeds:
        for method in flags:
            print(f"\n== {method}, seed {seed}", flush=True)
            results[method].append(run(method, seed, flags[method], arguments))
    picture = arguments.out / "accuracy.png"
    draw_results(results, picture, arguments.ranks)
    print(f"\n{table(results)}\n")
    print("bytes/step: what each rank sends per optimizer step, averaged over the run")
    print("syncs: how often the ranks exchanged gradients or weights")
    print("traffic: compared with plain DDP")
    print(f"picture: {picture}")
    print(f"all together: {time.monotonic() - started:.0f} s")


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--methods", nargs="+", default=METHODS, help='"dense" for plain DDP, and spec strings')
    add("--ranks", type=int, default=2, help="processes on this machine [2]")
    # Half of the configuration's epochs: enough for all three methods.
    add("--epochs", type=int, default=12, help="passes over the data [12]")
    add("--seeds", type=seed_list, default=(0,), metavar="LIST", help="such as 0,1,2 [0]")
    add("--out", type=Path, default=Path("runs/quickstart"), help="folder [runs/quickstart]")
    add("extra", nargs="*", help="after --: further flags of recipes.train")
    parsed = parser.parse_args(words)
    for name in ("ranks", "epochs"):
        check_count(f"--{name}", getattr(parsed, name))
    return parsed


def flags_of(method: str) -> list[str]:
    """Return the flags of recipes.train for a method."""
    if method == "dense":
        return []
    schedule = isinstance(parse_any(method), Schedule)
    return ["--sync" if schedule else "--compress", method]


def run(method: str, seed: int, flags: list[str], arguments: argparse.Namespace) -> Result:
    # Spec strings contain characters that a folder's name should not.
    folder = arguments.out / f"seed{seed}" / re.sub(r"[^\w.]+", "-", method).strip("-")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(arguments.ranks), "-m", "recipes.train"]
    command += ["--config", str(_CONFIG), *flags, "--epochs", str(arguments.epochs)]
    command += ["--seed", str(seed), "--out", str(folder), *arguments.extra]
    # torchrun warns if OMP_NUM_THREADS is missing. The recipe sets its threads itself.
    # Idle OpenMP threads that spin would take the cores from the other rank.
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **os.environ}
    if call(command, environment) != 0:
        sys.exit(f"error: the run {method!r} failed; its own message is above")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [(x["bytes_sent"], x["test_accuracy"]) for x in lines if "test_accuracy" in x]
    return Result(json.loads((folder / "summary.json").read_text()), curve)


def call(command: list[str], environment: dict[str, str]) -> int:
    """Run a command. After the time limit, or on an interrupt, torchrun ends its ranks."""
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait(timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"error: no end after {_TIMEOUT_SECONDS} s", file=sys.stderr)
        return 1
    finally:
        process.terminate()
        process.wait()


def table(results: dict[str, list[Result]]) -> str:
    rows = [("method", "accuracy", "bytes/step", "syncs", "traffic")]
    for method, runs in results.items():
        summary = runs[0].summary
        sent, syncs = summary["bytes_per_step"], summary["synchronisations"]
        less = "plain DDP" if method == "dense" else f"{saving(runs):.1f}x less"
        rows.append((method, accuracy(runs), f"{sent:,.0f}", f"{syncs:,}", less))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def saving(runs: list[Result]) -> float:
    """Return how many times fewer bytes than plain DDP a rank sent."""
    summary = runs[0].summary
    return float(summary["dense_bytes_per_step"] / summary["bytes_per_step"])


def accuracy(runs: list[Result]) -> str:
    """Return the test accuracy in percent, with its standard deviation for several runs."""
    return f"{spread(100 * run.summary['test_accuracy'] for run in runs).with_deviation(1)} %"


def draw_results(results: dict[str, list[Result]], path: Path, ranks: int) -> None:
    """Draw test accuracy against the bytes that a rank has sent, on a log axis."""
    lines = []
    for index, (method, runs) in enumerate(results.items()):
        color = f"C{index}"
        for run in runs:
            x, y = [sent / 1e6 for sent, _ in run.curve], [100 * value for _, value in run.curve]
            style = {"color": color, "linewidth": 2, "alpha": len(runs) ** -0.5}
            lines.append(Line("_", x, y, style=style))
        less = "" if method == "dense" else f", {saving(runs):.1f}x less"
        name = "plain DDP" if method == "dense" else method
        label = f"{name}: {accuracy(runs)}, {x[-1]:.3g} MB{less}"
        end = fmean(100 * run.curve[-1][1] for run in runs)
        style = {"color": color, "marker": MARKERS[index % len(MARKERS)], "markersize": 10}
        lines.append(Line(label, [x[-1]], [end], style=style))
    best = max(results, key=lambda method: saving(results[method]))
    title = (
        f"Handwritten digits, {ranks} ranks: {best}\n"
        f"sends {saving(results[best]):.0f}x fewer bytes than plain DDP"
    )
    axis = "MB sent by each rank since the start (log scale)"
    panel = Panel(axis, "test accuracy, %", lines=lines, log="x", legend=True)
    draw(path, title, [panel], size=(8, 4.5), dpi=120)


if __name__ == "__main__":
    main()
