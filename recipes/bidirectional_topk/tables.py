"""The tables of the page, from the committed results."""

from pathlib import Path

from recipes.bidirectional_topk import counterexample, lr_inside
from recipes.bidirectional_topk.methods import METHODS
from recipes.bidirectional_topk.problems import SHIFTED_DIGITS
from recipes.bidirectional_topk.runs import RATIO
from recipes.bidirectional_topk.summary import (
    PUBLISHED,
    Growth,
    Quantity,
    Scores,
    Unions,
    confidence,
    grouped,
    growth,
    scores,
    traffic_means,
    usual,
)
from recipes.bidirectional_topk.union import BOTH_WAYS, LR, ONE_WAY, STEPS
from recipes.page_tables import markdown_table
from recipes.result_files import read_csv
from recipes.spread import Spread, paired, spread

_MEASURED = "MLP on digits, K = 0.001 d, steps 601 to 1,000"


def seen(results: Path) -> str:
    """Return what is seen, as a bullet of the page."""
    groups = usual(_unions(results))
    known = [each for each in groups if each.run.workers in PUBLISHED]
    unions = ", ".join(spread(each.late.values()).with_deviation(1) for each in known)
    thesis = ", ".join(f"{PUBLISHED[each.run.workers]:g}" for each in known)
    workers = ", ".join(str(each.run.workers) for each in known)
    entries, nbytes = (
        growth(groups, quantity).exponent.mean
        for quantity in (lambda each: each.late, lambda each: each.saving)
    )
    gaps = _gaps(results, BOTH_WAYS, ONE_WAY), _gaps(results, BOTH_WAYS, "dense")
    steps = {row["steps"] for row in read_csv(results / "accuracy.csv")}
    seeds = {len(one.accuracies) for each in _scores(results).values() for one in each.values()}
    return (
        f"- **What we see**: with N = {workers}, the union is {unions} K (thesis: {thesis} K). The "
        f"saving of a server grows like N^{entries:.2f} in entries and like N^{nbytes:.2f} in "
        f"bytes ({_MEASURED}, {len(groups[0].late)} seeds, `--only union`). Bidirectional TopK "
        f"ends {gaps[0]} points from unidirectional and {gaps[1]} from dense "
        f"({', '.join(steps)} steps, {max(seeds)} seeds, `--only accuracy`)."
    )


def losses(results: Path) -> str:
    """Return where the method loses, as a bullet of the page."""
    groups = _unions(results)
    most = usual(groups)[-1]
    early = spread(most.over(0, 25).values()).with_deviation(1)
    other = usual(groups, dataset=SHIFTED_DIGITS)[-1]
    harder = spread(other.late.values()).with_deviation(1)
    largest = max(groups, key=lambda each: (each.run.ratio, each.run.workers))
    shared = spread(largest.late.values()).with_deviation(1)
    received = traffic_means(read_csv(results / "union.csv"))
    few = max((each.workers for each in received if each.total > each.gather), default=0)
    last = received[-1]
    return (
        f"- **Where it loses**: the union of {most.run.workers} workers is only {early} K in the "
        f"first 25 steps, and {harder} K and still rising on a harder problem (shifted digits). "
        f"With K = {largest.run.ratio:g} d, that of {largest.run.workers} is {shared} K. Without a "
        f"server, up to {few} ranks receive more than with `ef(topk)` by all-gather, and with "
        f"{last.workers}, {100 * last.selection / last.total:.0f} % of what they receive serves "
        "the exact selection (K = 0.001 d; all `--only union`)."
    )


def counterexample_values(results: Path) -> str:
    """Return F at the thesis's learning rate."""
    rows = counterexample.at_thesis_lr(read_csv(results / counterexample.TABLE))
    header = ["", *(f"F({t})" for t in counterexample.MOMENTS)]
    header.append(f"mean F over [{counterexample.TAIL_FROM}, {counterexample.STEPS})")
    return markdown_table(header, [[row["method"], *counterexample.numbers(row)] for row in rows])


def counterexample_scan(results: Path) -> str:
    """Return how far above the minimum F stays, by learning rate; the lower one in bold."""
    gaps = sorted(counterexample.late_gaps(read_csv(results / counterexample.TABLE)).items())
    rows = []
    for method in counterexample.SCANNED:
        texts = [f"{each[method]:.2f}" for _, each in gaps]
        lower = [each[method] == min(each.values()) for _, each in gaps]
        bold = [f"**{text}**" if low else text for text, low in zip(texts, lower, strict=True)]
        rows.append([method, *bold])
    return markdown_table(["", *(f"{lr:g}" for lr, _ in gaps)], rows)


def unions(results: Path) -> str:
    """Return the union by N, early and late."""
    groups = _unions(results)
    both_ways = {each.run.workers: each for each in usual(groups, method=BOTH_WAYS)}
    rows = []
    for each in usual(groups):
        n = each.run.workers
        halves = [spread(half.values()).with_deviation(2) for half in each.halves]
        first = f"{spread(each.over(0, 25).values()).mean:.2f}"
        both = spread(both_ways[n].late.values()).with_deviation(2)
        rows.append(
            [n, PUBLISHED.get(n, ""), f"{each.random:.2f}", first, *halves, _change(each), both]
        )
    last = groups[0].steps
    late, middle = last * 3 // 5, last * 4 // 5
    header = ["N", "thesis", "random supports", "steps 1-25", f"{late + 1}-{middle}"]
    header += [f"{middle + 1}-{last}", "change", f"bidirectional, {late + 1}-{last}"]
    return markdown_table(header, rows)


def savings(results: Path) -> str:
    """Return the saving on the downlink of a server by N."""
    rows = [
        [
            each.run.workers,
            f"{spread(each.late.values()).with_deviation(1)}x",
            f"{spread(each.saving.values()).with_deviation(1)}x",
            f"{each.random_saving:.1f}x",
        ]
        for each in usual(_unions(results))
    ]
    return markdown_table(["N", "entries", "bytes", "bytes, random supports"], rows)


def growths(results: Path) -> str:
    """Return the fits of the saving against N."""
    groups = _unions(results)
    digits, cnn = usual(groups), usual(groups, model="cnn")
    shifted = usual(groups, dataset=SHIFTED_DIGITS)
    alike = [each for each in digits if each.run.workers in {e.run.workers for e in cnn}]
    fitted: dict[str, tuple[list[Unions], Quantity]] = {
        "MLP, entries": (digits, lambda each: each.late),
        "MLP, bytes": (digits, lambda each: each.saving),
        "MLP, bytes, the N below": (alike, lambda each: each.saving),
        "CNN, bytes": (cnn, lambda each: each.saving),
        "MLP on shifted digits, bytes": (shifted, lambda each: each.saving),
        "random supports (MLP), entries": (digits, lambda each: {0: each.random}),
        "random supports (MLP), bytes": (digits, lambda each: {0: each.random_saving}),
    }
    # A line through two points shows nothing.
    rows = [
        [
            name,
            ", ".join(str(each.run.workers) for each in found),
            *_fit_cells(growth(found, quantity)),
        ]
        for name, (found, quantity) in fitted.items()
        if len(found) > 2
    ]
    header = ["saving in", "N", "slope on N", "intercept", "R²", "exponent of N, 95 % interval"]
    return markdown_table(header, rows)


def variations(results: Path) -> str:
    """Return the late union with other models, data, values of K and learning rates."""
    groups = _unions(results)
    chosen = {
        "CNN": usual(groups, model="cnn"),
        "shifted digits": usual(groups, dataset=SHIFTED_DIGITS),
        **{
            f"K = {ratio:g} d": usual(groups, ratio=ratio)
            for ratio in sorted({each.run.ratio for each in groups} - {RATIO})
        },
        **{f"lr {lr:g}": usual(groups, lr=lr) for lr in sorted({e.run.lr for e in groups} - {LR})},
    }
    rows = [
        [
            name,
            each.run.workers,
            each.k,
            spread(each.late.values()).with_deviation(2),
            _change(each),
            f"{each.random:.2f}",
            f"{100 * spread(each.touched.values()).mean / each.d:.1f} %",
            f"{each.random_touched:.2f}",
        ]
        for name, found in chosen.items()
        for each in found
    ]
    header = ["", "N", "K", "union, in K", "change", "random supports", "touched parameters"]
    return markdown_table([*header, "random among these"], rows)


def long_runs(results: Path) -> str:
    """Return the union of the longer runs, over 250 steps at a time."""
    groups = [each for each in _unions(results) if each.run.steps > STEPS]
    starts = range(0, 2 * STEPS, 250)
    rows = [
        [
            each.run.dataset,
            *(spread(each.over(t, t + 250).values()).with_deviation(1) for t in starts),
        ]
        for each in sorted(groups, key=lambda each: each.run)
    ]
    return markdown_table(["", *(f"{t + 1}-{t + 250}" for t in starts)], rows)


def traffic(results: Path) -> str:
    """Return the bytes that a rank receives per step, without a server."""
    lines = []
    for each in traffic_means(read_csv(results / "union.csv")):
        counts = (each.up, each.down, each.selection, each.total, each.busiest)
        planned = (each.by_shard, each.gather, each.sharded)
        lines.append([each.workers, *(f"{count:,.0f}" for count in (*counts, *planned))])
    header = ["N", "up", "down", "selection", "all", "busiest rank, up"]
    header += ['all, `selection="shard"`', "`ef(topk)`, allgather", "`ef(topk)`, sharded"]
    return markdown_table(header, lines)


def accuracy(results: Path) -> str:
    """Return the test accuracies, each with its learning rate."""
    rows = []
    for (model, n), methods in _scores(results).items():
        cells = [
            f"{spread(methods[name].accuracies.values()).with_deviation()} ({methods[name].lr:g})"
            for name in METHODS
        ]
        rows.append([f"{model.upper()}, N = {n}", *cells])
    return markdown_table(["", *METHODS], rows)


def differences(results: Path) -> str:
    """Return the differences of the test accuracies, paired by seed."""
    pairs = [(name, "dense") for name in METHODS if name != "dense"]
    pairs += [(name, ONE_WAY) for name in (BOTH_WAYS, "downlink only")]
    rows = []
    for (model, n), methods in _scores(results).items():
        compared = [
            paired(methods[ours].accuracies, methods[theirs].accuracies) for ours, theirs in pairs
        ]
        rows.append([f"{model.upper()}, N = {n}", *(each.with_error() for each in compared)])
    return markdown_table(["", *(f"{ours} - {theirs}" for ours, theirs in pairs)], rows)


def learning_rate(results: Path) -> str:
    """Return the comparison of the learning rate inside the residual and outside of it."""
    return lr_inside.text_of(read_csv(results / lr_inside.TABLE))


TABLES = {
    "seen": seen,
    "losses": losses,
    "counterexample_values": counterexample_values,
    "counterexample_scan": counterexample_scan,
    "unions": unions,
    "savings": savings,
    "growths": growths,
    "variations": variations,
    "long_runs": long_runs,
    "traffic": traffic,
    "accuracy": accuracy,
    "differences": differences,
    "lr_inside": learning_rate,
}


def _unions(results: Path) -> list[Unions]:
    return grouped(read_csv(results / "union.csv"))


def _gaps(results: Path, ours: str, theirs: str) -> str:
    """Return the range of the mean differences in accuracy over all problems."""
    gaps = [
        paired(methods[ours].accuracies, methods[theirs].accuracies).mean
        for methods in _scores(results).values()
    ]
    return f"{min(gaps):+.1f} to {max(gaps):+.1f}"


def _change(each: Unions) -> str:
    return each.change.with_error()


def _scores(results: Path) -> dict[tuple[str, int], dict[str, Scores]]:
    return scores(read_csv(results / "accuracy.csv"))


def _fit_cells(fit: Growth) -> list[str]:
    return [
        fit.slope.with_deviation(3),
        fit.intercept.with_deviation(2),
        fit.r2.with_deviation(4),
        _interval(fit.exponent),
    ]


def _interval(values: Spread) -> str:
    if values.count == 1:
        return f"{values.mean:.3f}"
    half = confidence(values)
    return f"{values.mean:.3f} ({values.mean - half:.3f} to {values.mean + half:.3f})"
