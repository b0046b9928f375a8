"""The tables of the page, from the committed results."""

from pathlib import Path

from recipes.page_tables import markdown_table
from recipes.result_files import read_csv
from recipes.small_gpt.summary import Summary, summaries
from recipes.small_gpt.training import DENSE

_WARMUP = 'warmup(topk(0.17, values="int4"), steps=60, start=0.34)'


def short_runs(results: Path) -> str:
    """Return the table of 200 steps on two ranks, the lowest loss first."""
    compared = _compared(results)
    rows = [[*_named(each), _excess(each), f"{each.loss.mean:.3f}"] for each in compared]
    return markdown_table(["method", "traffic", "excess, %", "loss"], rows)


def longer_runs(results: Path) -> str:
    """Return the table of 600 and 2,400 steps, the least traffic saved first."""
    short, long = (
        {each.method: each for each in _compared(results / folder)}
        for folder in ("steps_600", "steps_2400")
    )
    rows = []
    for each in sorted((long | short).values(), key=lambda each: each.saving):
        found = [runs.get(each.method) for runs in (short, long)]
        # The warm-up has another share of the longer run.
        savings = dict.fromkeys(f"{one.saving:.1f}x" for one in found if one)
        excesses = [_excess(one) if one else "" for one in found]
        rows.append([f"`{each.method}`", ", ".join(savings), *excesses])
    return markdown_table(["method", "traffic", "600 steps, %", "2,400 steps, %"], rows)


def four_ranks(results: Path) -> str:
    """Return the table of 600 steps on four ranks."""
    rows = [[*_named(each), _excess(each)] for each in _compared(results / "four_ranks")]
    table = markdown_table(["method", "traffic", "excess, %"], rows)
    return table.replace(_WARMUP, "W")


def dense(results: Path) -> str:
    """Return the losses of plain DDP, in nats per character."""
    folders = {"200": "", "600": "steps_600", "2,400": "steps_2400"}
    rows = []
    for steps, folder in folders.items():
        loss = _all(results / folder)[0].loss
        rows.append([steps, loss.with_deviation(3), loss.count])
    return markdown_table(["steps", "loss of plain DDP, nats per character", "seeds"], rows)


TABLES = {
    "short_runs": short_runs,
    "longer_runs": longer_runs,
    "four_ranks": four_ranks,
    "dense": dense,
}


def _all(folder: Path) -> list[Summary]:
    return summaries(read_csv(folder / "runs.csv"))


def _compared(folder: Path) -> list[Summary]:
    others = [each for each in _all(folder) if each.method != DENSE]
    return sorted(others, key=lambda each: each.excess.mean)


def _named(each: Summary) -> list[str]:
    return [f"`{each.method}`", f"{each.saving:.1f}x"]


def _excess(each: Summary) -> str:
    return each.excess.with_error(1)
