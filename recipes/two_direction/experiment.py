"""2Direction beside the methods that it is compared with, on multinomial logistic regression.

    python recipes/two_direction/experiment.py
    python recipes/two_direction/experiment.py --dataset cifar10 --data FOLDER --workers 100

Each method gets its best step size 2^i, found with seed 0, and then runs with every seed, which
shuffles the samples and draws the messages. What is counted is what one worker sends and receives
until f is within the gap of its minimum.
"""

import argparse
import math
import statistics
import sys
import time
from pathlib import Path

import torch
from contest import METHODS, Result, Setting, run, tuned
from curves import draw_curves, write_curves
from data_sets import DATASETS, RecipeError, open_samples

# The recipes are scripts: they import their neighbours as modules beside them.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from result_files import write_csv

from torchcomp.algorithms.tuning import POWERS, Point
from torchcomp.errors import SpecError

_HERE = Path(__file__).resolve().parent
# Total coordinates of a worker to a gap of 1e-6: digits, 10 workers, K = 65; an earlier program of
# ours, of which nothing else is left.
REFERENCE = {
    (1e-4, "2Direction"): 333_125,
    (1e-4, "AGD"): 523_900,
    (1e-4, "EF21-P + DIANA"): 832_000,
    (1e-2, "2Direction"): 104_650,
    (1e-2, "AGD"): 79_300,
    (1e-2, "EF21-P + DIANA"): 34_450,
}


def main() -> None:
    """Run, show, and write what came out."""
    arguments = parse(sys.argv[1:])
    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        samples = open_samples(arguments.dataset, arguments.data)
        for mu in arguments.mu:
            k = arguments.k or max(1, samples.d // 10)
            lowest, highest = arguments.powers
            limits = (arguments.gap, arguments.budget, arguments.every)
            grid = range(lowest, highest + 1)
            setting = Setting(samples, arguments.workers, mu, k, *limits, grid)
            contest(setting, arguments.methods, arguments.seeds, arguments.out)
    except (RecipeError, SpecError) as error:
        sys.exit(f"error: {error}")
    print(f"all together: {time.monotonic() - started:.0f} s")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--dataset", choices=DATASETS, default="digits", help="[digits]")
    parser.add_argument("--data", type=Path, help="where cifar10 or real-sim lies")
    parser.add_argument("--workers", type=_count, default=10, help="n, equal shards [10]")
    parser.add_argument(
        "--mu", type=_above_0, nargs="+", default=[1e-4, 1e-2], help="regulariser [1e-4 1e-2]"
    )
    parser.add_argument("--k", type=_count, help="values of a compressed message [d/10]")
    parser.add_argument("--gap", type=_above_0, default=1e-6, help="f - f* to reach [1e-6]")
    parser.add_argument(
        "--budget", type=_count, default=3_000_000, help="coordinates of a run [3,000,000]"
    )
    parser.add_argument("--every", type=_count, default=1, help="iterations between looks at f [1]")
    bounds = {"nargs": 2, "metavar": ("LOW", "HIGH"), "default": [POWERS[0], POWERS[-1]]}
    parser.add_argument("--powers", type=int, help="steps to try: 2^LOW to 2^HIGH", **bounds)
    parser.add_argument(
        "--seeds", type=_count, default=5, help="runs of a method, after tuning [5]"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        choices=METHODS,
        default=list(METHODS),
        help=f"some of: {'; '.join(METHODS)} [all]",
    )
    parser.add_argument("--out", type=Path, default=_HERE / "results", help="folder of the files")
    return parser.parse_args(words)


def _count(word: str) -> int:
    if not word.isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {word!r}")
    return int(word)


def _above_0(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, not {word!r}")
    return value


def contest(setting: Setting, methods: list[str], seeds: int, folder: Path) -> None:
    """Tune and run the methods on one setting; write a table, curves and a picture.

    All files are written anew after every method: a long run can be cut short.
    """
    print(heading(setting))
    results: list[Result] = []
    curves: dict[str, list[Point]] = {}
    for method in methods:
        best = tuned(setting, method)
        curves[method] = best.run.curve
        own = [Result.of(method, best.power, 0, best.run)]
        for seed in range(1, seeds) if best.run.reached else ():
            again = run(setting, method, best.power, seed)
            own.append(Result.of(method, best.power, seed, again))
        print(row(setting, own), flush=True)
        results += own
        write(setting, results, curves, folder)


def write(
    setting: Setting, results: list[Result], curves: dict[str, list[Point]], folder: Path
) -> None:
    """Write the table, the curves of seed 0, and their picture."""
    name = f"{setting.samples.name}_n{setting.n}_mu{setting.mu:g}"
    header = ["method", "power", "seed", "reached", "iterations", "value"]
    header += ["up", "down", "total", "bytes_up", "bytes_down"]
    write_csv(folder / f"{name}.csv", header, [cells(result) for result in results])
    write_curves(folder / f"{name}_curves.csv", curves, setting.least(0))
    draw_curves(folder / f"{name}_curves.csv", title(setting), setting.gap)


def cells(result: Result) -> list[object]:
    """Return a result as a row of the CSV."""
    last, traffic = result.last, result.last.traffic
    named = [result.method, result.power, result.seed, result.reached]
    counts = [traffic.up_coordinates, traffic.down_coordinates, traffic.coordinates]
    return [*named, last.iterations, last.value, *counts, traffic.up_bytes, traffic.down_bytes]


def title(setting: Setting) -> str:
    """Return what a table or a picture is about."""
    s = setting
    return f"{s.samples.name}, {s.n} workers, d = {s.samples.d}, K = {s.k}, mu = {s.mu:g}"


def heading(setting: Setting) -> str:
    """Return the lines above the table of a setting."""
    what = f"what a worker sends and receives until f - f* <= {setting.gap:g}"
    columns = f"{'':<22}{'step':>6}{'iterations':>12}{'coordinates: median, range':>38}{'MB':>9}"
    return f"\n{title(setting)}: {what}\n{columns}{'reference':>12}"


def row(setting: Setting, results: list[Result]) -> str:
    """Return a method's line of the table, over all seeds."""
    first = results[0]
    name = f"{first.method:<22}{f'2^{first.power}':>6}"
    if not all(result.reached for result in results):
        return f"{name}{'':>12}{f'not within {setting.budget:,}':>38}"
    totals = [result.last.traffic.coordinates for result in results]
    spread = f"{statistics.median(totals):,.0f} ({min(totals):,} to {max(totals):,})"
    iterations = statistics.median(result.last.iterations for result in results)
    megabytes = statistics.median(result.last.traffic.nbytes for result in results) / 1e6
    comparable = (setting.samples.name, setting.n, setting.k, setting.gap) == (
        "digits",
        10,
        65,
        1e-6,
    )
    known = REFERENCE.get((setting.mu, first.method)) if comparable else None
    reference = f"{known:,}" if known else ""
    return f"{name}{iterations:>12,.0f}{spread:>38}{megabytes:>9.2f}{reference:>12}"


if __name__ == "__main__":
    main()
