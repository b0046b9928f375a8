"""The final accuracy of every method: means over seeds, and differences paired by seed."""

from dataclasses import dataclass
from pathlib import Path

from scipy import stats

from benchmarks.accuracy import HELD_OUT, TEST, best_lrs
from benchmarks.net.names import BASELINES, BF16, FLOOR, PLAIN
from benchmarks.report_data import MISSING, Row, read
from recipes.spread import Spread, paired, spread

HEADS = ["method", "accuracy, %", "compared with `ddp`", "with `bf16`", "learning rate", "runs"]


@dataclass(frozen=True)
class Final:
    """A method at the learning rate that was best on the held-out images.

    Attributes:
        by_seed: accuracy on the test images, in per cent.
        tried: the learning rates that were compared on the held-out images.
    """

    method: str
    lr: float
    by_seed: dict[int, float]
    tried: frozenset[float] = frozenset()

    @property
    def accuracy(self) -> Spread:
        return spread(self.by_seed.values())

    def above(self, other: "Final") -> Spread:
        """By how much the accuracy is above another method's, paired by seed."""
        return paired(self.by_seed, other.by_seed)

    def is_below(self, other: "Final") -> bool:
        """Whether the accuracy is lower by more than two standard errors of the difference."""
        difference = self.above(other)
        return difference.mean < -2 * difference.error


def finals(path: Path) -> dict[str, Final]:
    """The result of every method: baselines first, then specs in the order of the file."""
    rows = read(path)
    lrs, found = best_lrs(rows), dict.fromkeys(row["method"] for row in rows)
    order = [m for m in BASELINES if m in found] + [m for m in found if m not in BASELINES]
    results = {
        method: Final(method, lrs[method], _by_seed(rows, method, lrs), tried(rows, method))
        for method in order
    }
    return {method: final for method, final in results.items() if final.by_seed}


def tried(rows: list[Row], *methods: str) -> frozenset[float]:
    """The learning rates that a method, or any of several, was tried with on held-out images."""
    return frozenset(
        float(row["lr"]) for row in rows if row["images"] == HELD_OUT and row["method"] in methods
    )


def _by_seed(rows: list[Row], method: str, lrs: dict[str, float]) -> dict[int, float]:
    return {
        int(row["seed"]): float(row["accuracy"])
        for row in rows
        if (row["method"], row["images"], float(row["lr"])) == (method, TEST, lrs[method])
    }


def table(results: Path) -> list[list[str]]:
    """The rows of the page's table, with :data:`HEADS`."""
    found = finals(results / "accuracy.csv")
    rows = []
    for final in found.values():
        differences = [_difference(final, found.get(name)) for name in (PLAIN, BF16)]
        edge = " (end of the grid)" if final.lr in (min(final.tried), max(final.tried)) else ""
        cells = [final.accuracy.with_deviation(), *differences, f"{final.lr:g}{edge}"]
        rows.append([f"`{final.method}`", *cells, str(len(final.by_seed))])
    return rows


def _difference(final: Final, other: Final | None) -> str:
    return MISSING if other is None or final is other else final.above(other).with_error()


def text(results: Path) -> str:
    """The text above the table."""
    rows, found = read(results / "accuracy.csv"), finals(results / "accuracy.csv")
    if not {PLAIN, FLOOR} <= found.keys():
        return "Not measured yet."
    tuning = len({row["seed"] for row in rows if row["images"] == HELD_OUT})
    grid = sorted(tried(rows, *found))
    first = next(row for row in rows if row["images"] == TEST)

    def distinct(column: str) -> list[str]:
        return sorted({row[column].partition("T")[0] for row in rows})

    return f"""
Accuracy on the digits' test images at the end of the schedule, for every method of this page. The
small CNN trains on {first["ranks"]} ranks over the loopback, in the setting of [time to
accuracy](#time-to-accuracy), for all {first["steps"]} steps:

```
python -m benchmarks.accuracy --resume
```

- Mean and standard deviation over the seeds; after a difference, its standard error, paired by
  seed. One test image is {100 / 360:.2f} points.
- Each method has its own peak learning rate: the best of {", ".join(f"{lr:g}" for lr in grid)} on
  240 held-out images. They are every sixth training image, and the seeds are others ({tuning} per
  learning rate). The reported runs train on all training images.
- So few images cannot tell apart learning rates that differ by less than half a point. A difference
  of that size between two methods can come from this choice, and the best learning rate can lie
  beyond an end of the grid.
- Rank 0's weights are tested. Momentum is 0.9, as in the configuration.
- The task is easy, and tells only large losses apart: a single rank with its part of the images
  (`{FLOOR}`) ends at {found[FLOOR].accuracy.mean:.2f} %.
- Measured on {", ".join(distinct("date"))}, with torch {", ".join(distinct("torch"))}, at revisions
  {", ".join(distinct("revision"))}.

{conclusion(found)}
"""


def conclusion(found: dict[str, Final]) -> str:
    """Which methods are clearly below plain DDP, in words."""
    plain = found[PLAIN]
    others = [final for final in found.values() if final.method not in (PLAIN, FLOOR)]
    below = [
        f"`{final.method}`: {final.above(plain).with_error()} points"
        for final in others
        if final.is_below(plain)
    ]
    level = [f"`{final.method}`" for final in others if not final.is_below(plain)]
    # Student's t: with few seeds, the standard error itself is uncertain.
    chance = float(stats.t.sf(2, len(plain.by_seed) - 1))
    return f"""
Below plain DDP by more than two standard errors. With {len(plain.by_seed)} seeds, chance alone puts
{100 * chance:.0f} % of methods there:

{listed(below)}

Not below it by that much:

{listed(level)}
""".strip()


def listed(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items or ["none"])
