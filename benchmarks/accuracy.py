"""Measure the test accuracy of every method at the end of the same training.

    python -m benchmarks.accuracy --resume

The small CNN trains on the digits with the schedule of recipes/configs/digits.yaml, on ranks of
this machine that are connected by the loopback. Every method first trains without every sixth
training image, at each learning rate of the grid. The best one on these held-out images is used to
train on all training images, once per seed. Results are rows of accuracy.csv in the folder --out.
"""

import signal
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from itertools import product

from benchmarks.arguments import table_folder, table_parser
from benchmarks.net.job import Job
from benchmarks.net.launch import LaunchError, free_port, results
from benchmarks.net.names import BASELINES
from benchmarks.net.rows import FINAL, Table, TableError, conditions

HELD_OUT, TEST = "held-out", "test"
MODEL, BATCH, RANKS = "smallcnn", 16, 4
LRS = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
# Not a seed of the reported runs, so that none of these chooses the learning rate.
TUNING_SEEDS = (1000,)
METHODS = (
    *BASELINES,
    "mean",
    'bidirectional(topk(0.001, values="int8"), topk(0.001, values="int8"), selection="shard")',
    'bidirectional(topk(0.01, values="int8"), topk(0.01, values="int8"), selection="shard")',
    'bidirectional(topk(0.01, values="int8"), topk(0.01, values="int8"), selection="exact")',
    'ef(topk(0.01, values="int8"))',
    "ef(topk(0.01))",
    "qsr(alpha=0.2, h_base=4)",
)


def main() -> None:
    # Here, because the report imports this module, and should not have to import torch.
    from recipes.errors import exit_on_user_error
    from recipes.result_files import make_folder

    parser = table_parser(__doc__)
    add = parser.add_argument
    add("--methods", nargs="+", default=METHODS, metavar="METHOD", help="any spec of torchcomp")
    add("--seeds", type=int, default=5, help="runs per method on the test images [5]")
    parser.set_defaults(out=table_folder(False, "accuracy"))
    arguments = parser.parse_args()
    # End on SIGTERM as on Ctrl-C: an exception ends the workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with exit_on_user_error(LaunchError, TableError):
        check(arguments.methods, arguments.seeds)
        make_folder(arguments.out)
        table = Table(arguments.out / "accuracy.csv", FINAL)
        tuning = product(arguments.methods, LRS, TUNING_SEEDS)
        measure(table, HELD_OUT, tuning, resume=arguments.resume)
        lrs = best_lrs(table.read())
        runs = [(method, lrs[method]) for method in arguments.methods]
        reported = ((*run, seed) for run, seed in product(runs, range(arguments.seeds)))
        measure(table, TEST, reported, resume=arguments.resume)


def check(methods: Iterable[str], seeds: int) -> None:
    """Raise SpecError unless every method is known and there is at least one seed."""
    import torchcomp
    from benchmarks.net.methods import LAYERS
    from torchcomp.checks import check_count

    check_count("--seeds", seeds)
    for method in methods:
        if method not in BASELINES and not method.startswith(LAYERS):
            torchcomp.parse(method)


def measure(
    table: Table, images: str, runs: Iterable[tuple[str, float, int]], *, resume: bool
) -> None:
    """Train once per run (method, peak learning rate, seed), and add a row for each."""
    pending = [
        (method, lr, seed)
        for method, lr, seed in runs
        if not (resume and table.has(images=images, method=method, lr=lr, seed=seed))
    ]
    if not pending:
        return
    job = Job(
        task="final",
        model=MODEL,
        batch=BATCH,
        runs=tuple(pending),
        world=RANKS,
        address="127.0.0.1",
        port=free_port(),
        interface="lo",
        counted=False,
        held_out=images == HELD_OUT,
    )
    for result in results(job, [[]] * RANKS):
        row = {**conditions(), "ranks": RANKS, "model": MODEL, "batch": BATCH, "images": images}
        row |= {name: result[name] for name in ("parameters", "method", "seed")}
        # With `no-op` every rank has its own weights: report those of rank 0.
        first = result["ranks"][0]
        row |= {"lr": result["rate"], "steps": first["steps"]}
        row |= {"accuracy": f"{100 * first['accuracy']:.3f}", "loss": f"{first['loss']:.5f}"}
        table.add(row)
        print(f"{row['accuracy']} % of {images}, lr {row['lr']}, {row['method']}", flush=True)


def best_lrs(rows: list[dict[str, str]]) -> dict[str, float]:
    """Return each method's best learning rate on the held-out images, by accuracy, then by loss."""
    tried: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        if row["images"] == HELD_OUT:
            tried[row["method"], row["lr"]].append(row)
    best: dict[str, tuple[float, float, float]] = {}
    for (method, lr), runs in tried.items():
        accuracy = statistics.fmean(float(run["accuracy"]) for run in runs)
        loss = statistics.fmean(float(run["loss"]) for run in runs)
        found = accuracy, -loss, float(lr)
        best[method] = max(found, best.get(method, found))
    return {method: lr for method, (_, _, lr) in best.items()}


if __name__ == "__main__":
    main()
