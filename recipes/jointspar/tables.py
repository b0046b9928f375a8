"""The tables of the pages, from the committed results."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from recipes.jointspar import bandit, convergence_summary, large_batch, run_table, selection
from recipes.jointspar.drawing import dense_of
from recipes.jointspar.methods import LayerSampling, Method
from recipes.jointspar.run_table import Contender, Summary, TrainingRun, contender_of
from recipes.page_tables import TableMaker, markdown_table
from recipes.result_files import read_csv
from recipes.spread import Spread, paired, spread

_WAYS = {
    "plain DDP": "all (plain DDP)",
    "budget 100%": "all (JointSpar)",
    "budget 75%": "75 % of the layers, at random",
    "budget 50%": "50 %",
    "budget 25%": "25 %",
    "front dropped": "the back half",
    "back dropped": "the front half",
}


def bandit_table(results: Path) -> str:
    """Return the excess cost of both forms of Algorithm 1."""
    rows = []
    for form, numbers in bandit.summary(results / "bandit.csv").items():
        before, after = (_percent(numbers[part]) for part in ("before", "after"))
        steps = numbers["steps"].with_deviation(0) if "steps" in numbers else "never"
        rows.append([form, before, steps, after])
    header = ["form", "after 5,000 steps", "steps to 2 %", "5,000 steps after a change of norms"]
    return markdown_table(header, rows)


def selection_table(results: Path) -> str:
    """Return the share of the bytes that an all-reduce carries."""
    shares = selection.summary(results / "selection.csv")
    rows = []
    for budget in selection.BUDGETS:
        for kind in selection.KINDS:
            cells = [f"{shares[budget, ranks][kind].mean:.0%}" for ranks in selection.RANKS]
            rows.append([f"{budget:.0%}", kind.replace("_", " "), *cells])
    ranks = [f"{count} ranks" for count in selection.RANKS]
    return markdown_table(["budget", "sets", *ranks], rows)


def backward_table(results: Path) -> str:
    """Return the bytes, the time and the kernels of the backward pass."""
    found = read_csv(results / "backward.csv")
    networks = list(dict.fromkeys(row["network"] for row in found))
    rows = []
    for way, text in _WAYS.items():
        cells = [
            f"{float(row['bytes_kept']):.0%}, {float(row['share_of_plain']):.0%} "
            f"({float(row['kernels']):g})"
            for network in networks
            for row in found
            if (row["network"], row["way"]) == (network, way)
        ]
        rows.append([text, *cells])
    return markdown_table(["kept", *networks], rows)


def accuracy_table(results: Path) -> str:
    """Return the accuracies of the large-batch runs, and the differences to dense training."""
    rows = _summaries(results)
    dense = dense_of(rows)
    others = [row for row in rows if row is not dense]
    labels = dict.fromkeys(row.contender.label for row in others)
    budgets = sorted({row.contender.method.budget for row in others})
    cells = {(row.contender.method.budget, row.contender.label): row for row in others}
    lines = [
        [f"{budget:.0%}", *(_accuracy(cells.get((budget, label)), dense) for label in labels)]
        for budget in budgets
    ]
    dense_line = ["100 %: dense LARS", f"{dense.accuracy.with_deviation()}, lr {dense.lr:g}"]
    lines.append([*dense_line, *[""] * (len(labels) - 1)])
    return markdown_table(["bytes", *labels], lines)


def learned_table(results: Path) -> str:
    """Return the paired differences of learned and uniform p, and the failed runs of both.

    With own norms, the two can have chosen different learning rates. They are also compared at
    equal ones.
    """
    runs = _runs(results)
    chosen = {row.contender: row.lr for row in run_table.summaries(runs)}
    rows = []
    for budget in large_batch.BUDGETS:
        running, own = (
            [Contender(method, optimizer) for method in _pair(budget)]
            for optimizer in ("lars", "lars-own")
        )
        lrs = [chosen[each] for each in own]
        cells = [_difference(runs, running, [chosen[each] for each in running])]
        cells.append(f"{_difference(runs, own, lrs)}, lr {lrs[0]:g} and {lrs[1]:g}")
        cells += [_difference(runs, own, [lr, lr]) for lr in large_batch.WHOLE.lrs]
        rows.append([f"{budget:.0%}", *cells])
    equal = [f"own norm, both {lr:g}" for lr in large_batch.WHOLE.lrs]
    return markdown_table(["bytes", "running norm", "own norm", *equal], rows)


def higher_lr_table(results: Path) -> str:
    """Return the failed runs and the mean of the others at the higher learning rate."""
    runs, lr = _runs(results), max(large_batch.WHOLE.lrs)
    rows = []
    for budget in large_batch.BUDGETS:
        cells = []
        for method in _pair(budget):
            tests, finished = _tests(runs, Contender(method), lr)
            mean = f"; {spread(finished.values()).with_deviation()}" if finished else ""
            cells.append(f"{len(tests) - len(finished)} of {len(tests)}{mean}")
        rows.append([f"{budget:.0%}", *cells])
    return markdown_table(["bytes", "learned p: failed; the others", "uniform p"], rows)


def wall_clock_table(results: Path) -> str:
    """Return the seconds of a run on two hosts."""
    found = read_csv(results / "wall_clock.csv")
    seconds = {contender_of(row): float(row["seconds"]) for row in found}
    contenders = [each for each in seconds if each.method.name != "dense"]
    labels = dict.fromkeys(each.label for each in contenders)
    budgets = sorted({each.method.budget for each in contenders})
    cells = {(each.method.budget, each.label): f"{seconds[each]:.1f} s" for each in contenders}
    rows = [
        [f"{budget:.0%}", *(cells.get((budget, label), "") for label in labels)]
        for budget in budgets
    ]
    (dense,) = (time for each, time in seconds.items() if each.method.name == "dense")
    rows.append(["100 %: dense LARS", f"{dense:.1f} s", *[""] * (len(labels) - 1)])
    return markdown_table(["bytes", *labels], rows)


def network_table(results: Path) -> str:
    """Return the time of a step of ResNet-18 on two hosts."""
    found = read_csv(results / "network_resnet18.csv")
    rows = []
    for row in found:
        low, middle, high = (float(row[f"step_ms{end}"]) / 1000 for end in ("_low", "", "_high"))
        rows.append([f"`{row['method']}`", f"{middle:.2f} s ({low:.2f} to {high:.2f})"])
    return markdown_table(["method", "time of a step"], rows)


def _convergence(
    make: Callable[..., str], name: str, results: Path, optimizer: str | None = None
) -> str:
    rows = read_csv(results / name)
    lrs = convergence_summary.chosen_lrs(read_csv(results / "convergence_tuning.csv"))
    return make(*([optimizer] if optimizer else []), rows, lrs)


def _runs(results: Path) -> list[TrainingRun]:
    return run_table.read_runs(results, large_batch.task_of("digits", "mlp", large_batch.WHOLE))


def _summaries(results: Path) -> list[Summary]:
    return run_table.summaries(_runs(results))


def _tests(
    runs: list[TrainingRun], contender: Contender, lr: float
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the test accuracies of all runs, and of those that did not fail, by seed."""
    least = dense_of(run_table.summaries(runs)).least
    tests = {
        run.planned.seed: run.outcome.test
        for run in runs
        if (run.planned.contender, run.planned.lr) == (contender, lr)
    }
    return tests, {seed: test for seed, test in tests.items() if test >= least}


def _difference(runs: list[TrainingRun], pair: Sequence[Contender], lrs: Sequence[float]) -> str:
    """Return the paired difference of two contenders, and how many runs of each failed."""
    (tests, ours), (others, theirs) = (
        _tests(runs, contender, lr) for contender, lr in zip(pair, lrs, strict=True)
    )
    cells = [paired(ours, theirs).with_error()] if ours.keys() & theirs.keys() else []
    failed = len(tests) - len(ours), len(others) - len(theirs)
    cells += [f"{failed[0]} and {failed[1]} failed"] if any(failed) else []
    return ", ".join(cells)


def _pair(budget: float) -> tuple[Method, Method]:
    return LayerSampling(budget, "bytes"), LayerSampling(budget, "bytes", rule=None)


def _accuracy(row: Summary | None, dense: Summary) -> str:
    if row is None:
        return ""
    difference = row.against(dense)
    cell = row.accuracy.with_deviation() + (f" ({difference.with_error()})" if difference else "")
    cell += f", lr {row.lr:g}"
    return f"{cell}, {row.failed} of {len(row.tests)} failed" if row.failed else cell


def _percent(share: Spread) -> str:
    digits = 2 if share.mean < 0.02 else 0
    return (
        f"{Spread(100 * share.mean, 100 * share.deviation, share.count).with_deviation(digits)} %"
    )


TABLES: dict[str, TableMaker] = {
    "bandit": bandit_table,
    "selection": selection_table,
    "backward": backward_table,
    "accuracy": accuracy_table,
    "learned": learned_table,
    "higher_lr": higher_lr_table,
    "wall_clock": wall_clock_table,
    "network": network_table,
    "sets": partial(_convergence, convergence_summary.sets_table, "convergence.csv"),
}
for _optimizer in ("sgd", "lars"):
    TABLES[f"accuracy_{_optimizer}"] = partial(
        _convergence, convergence_summary.accuracy_table, "convergence.csv", optimizer=_optimizer
    )
    TABLES[f"same_lr_{_optimizer}"] = partial(
        _convergence, convergence_summary.same_lr_table, "convergence.csv", optimizer=_optimizer
    )
    TABLES[f"speed_{_optimizer}"] = partial(
        _convergence,
        convergence_summary.speed_table,
        "convergence_curves.csv",
        optimizer=_optimizer,
    )
