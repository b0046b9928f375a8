"""2Direction beside the methods that it is compared with, on multinomial logistic regression.

    python -m recipes.two_direction.experiment
    python -m recipes.two_direction.experiment --dataset cifar10 --data FOLDER --workers 100

Each method gets its best step size 2^i, found with seed 0, and then runs with every seed, which
shuffles the samples and draws the messages. Where a seed does not arrive with that step, the method
gets the largest of the next three smaller ones with which all do, if there is one. What is counted
is what one worker sends and receives until f is within the gap of its minimum.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

from recipes.errors import told_in_one_line
from recipes.result_files import make_folder, write_csv
from recipes.two_direction.contest import METHODS, Result, Setting, check, run_all
from recipes.two_direction.curves import draw_curves, write_curves
from recipes.two_direction.data_sets import DATASETS, open_samples
from recipes.two_direction.tuning import POWERS, Point
from torchcomp.checks import check_count, check_positive

_HERE = Path(__file__).resolve().parent
# Of the step sizes 2^i: these and their inverses are numbers of full precision.
_LARGEST_POWER = 1022
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


@told_in_one_line()
def main() -> None:
    """Run, show, and write what came out; bad input ends in one line."""
    arguments = parse(sys.argv[1:])
    torch.set_num_threads(1)
    started = time.monotonic()
    given = settings(arguments)
    for setting in given:
        check(setting, arguments.methods)
    make_folder(arguments.out)
    for setting in given:
        contest(setting, arguments.methods, arguments.seeds, arguments.out)
    print(f"all together: {time.monotonic() - started:.0f} s")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parsed = _parser().parse_args(words)
    # What is named twice is run once.
    parsed.mu, parsed.methods = (list(dict.fromkeys(x)) for x in (parsed.mu, parsed.methods))
    _check_flags(parsed)
    return parsed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--dataset", choices=DATASETS, default="digits", help="[digits]")
    parser.add_argument("--data", type=Path, help="where cifar10 or real-sim lies")
    parser.add_argument("--workers", type=int, default=10, help="n, equal shards [10]")
    parser.add_argument(
        "--mu", type=float, nargs="+", default=[1e-4, 1e-2], help="regulariser [1e-4 1e-2]"
    )
    parser.add_argument("--k", type=int, help="values of a compressed message [d/10]")
    parser.add_argument("--gap", type=float, default=1e-6, help="f - f* to reach [1e-6]")
    parser.add_argument("--budget", type=int, default=3_000_000, help="coordinates a run [3e6]")
    parser.add_argument("--every", type=int, default=1, help="iterations between looks at f [1]")
    parser.add_argument(
        "--powers",
        nargs=2,
        metavar=("LOW", "HIGH"),
        type=int,
        default=[POWERS[0], POWERS[-1]],
        help="steps to try: 2^LOW to 2^HIGH [-20 20]",
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs of a method [5]")
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        choices=METHODS,
        default=list(METHODS),
        help=f"some of: {'; '.join(METHODS)} [all]",
    )
    parser.add_argument("--out", type=Path, default=_HERE / "results", help="folder of the files")
    return parser


def _check_flags(parsed: argparse.Namespace) -> None:
    for name in ("workers", "k", "budget", "every", "seeds"):
        if (value := getattr(parsed, name)) is not None:
            check_count(f"--{name}", value)
    for value in parsed.mu:
        check_positive("--mu", value)
    check_positive("--gap", parsed.gap)
    low, high = parsed.powers
    check_count("--powers LOW", low, -_LARGEST_POWER, _LARGEST_POWER)
    check_count("--powers HIGH", high, low, _LARGEST_POWER)


def settings(arguments: argparse.Namespace) -> list[Setting]:
    """Read the data, and return one setting for each mu."""
    samples = open_samples(arguments.dataset, arguments.data)
    k = max(1, samples.d // 10) if arguments.k is None else arguments.k
    low, high = arguments.powers
    limits = (k, arguments.gap, arguments.budget, arguments.every, range(low, high + 1))
    return [Setting(samples, arguments.workers, mu, *limits) for mu in arguments.mu]


def contest(setting: Setting, methods: list[str], seeds: int, folder: Path) -> None:
    """Tune and run the methods on one setting; write a table, curves and a picture.

    All files are written anew after every method: a long run can be cut short.
    """
    print(heading(setting))
    results: list[Result] = []
    curves: dict[str, list[Point]] = {}
    for method in methods:
        power, runs = run_all(setting, method, seeds)
        curves[method] = runs[0].curve
        own = [Result.of(method, power, seed, run) for seed, run in enumerate(runs)]
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
