"""Write docs/prediction.md from predict.csv.

python -m benchmarks.report_prediction           # write the page
python -m benchmarks.report_prediction --check   # exit 1 if it differs
"""

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.net.names import BF16, PLAIN
from benchmarks.report import markdown
from benchmarks.report_data import Row, read

_ROOT = Path(__file__).parents[1]
RESULTS = _ROOT / "benchmarks" / "results"
PAGE = _ROOT / "docs" / "prediction.md"
# Median and 90th percentile of the error, and the distance of the chosen method from the best.
_MEDIAN_GOAL, _TAIL_GOAL, _CHOICE_GOAL, _CLOSE = 0.10, 0.25, 0.90, 1.05
_DONT_GOAL, _LEAST_SETUPS = 0.95, 200
_USUAL_BATCH = "16"

Estimate = Callable[[Row], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    check, text = parser.parse_args().check, page(RESULTS)
    if not check:
        PAGE.write_text(text)
    elif not PAGE.is_file() or PAGE.read_text() != text:
        sys.exit("docs/prediction.md differs: run python -m benchmarks.report_prediction")


# --- Figures --------------------------------------------------------------------------------------


def measured(row: Row) -> float:
    return float(row["step_ms"])


def predicted(row: Row) -> float:
    return float(row["predicted_ms"])


def computed(row: Row) -> float:
    """The prediction from the numbers of the link alone."""
    return float(row["formula_ms"])


def errors(rows: Sequence[Row], estimate: Estimate = predicted) -> list[float]:
    """The relative error of each prediction, without its sign, ascending."""
    return sorted(abs(estimate(row) / measured(row) - 1) for row in rows)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the ascending `values` does not exceed."""
    return values[math.ceil(share * len(values)) - 1]


def is_schedule(row: Row) -> bool:
    return row["method"].startswith("every(")


@dataclass(frozen=True)
class Group:
    """The methods that were measured with one model on one link. Local steps are left out.

    Attributes:
        name: of the link and the model.
        rows: by method.
    """

    name: str
    rows: dict[str, Row]

    def chosen(self, estimate: Estimate = predicted) -> str:
        """The method that is fastest by an estimate."""
        return min(self.rows, key=lambda method: estimate(self.rows[method]))

    @property
    def best(self) -> str:
        """The method that was the fastest."""
        return self.chosen(measured)

    @property
    def regret(self) -> float:
        """The measured time of the chosen method, divided by that of the best."""
        return measured(self.rows[self.chosen()]) / measured(self.rows[self.best])

    def gain(self, estimate: Estimate) -> float:
        """The time of the bf16 hook, divided by that of the fastest method that is no baseline."""
        ours = [row for method, row in self.rows.items() if method not in (PLAIN, BF16)]
        return estimate(self.rows[BF16]) / min(map(estimate, ours))


def groups(rows: Sequence[Row]) -> list[Group]:
    """The groups that have the bf16 hook and a method of torchcomp."""
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if not is_schedule(row):
            found[f"{link(row)}, {model(row)}"][row["method"]] = row
    return [
        Group(name, by_method)
        for name, by_method in found.items()
        if BF16 in by_method and set(by_method) - {PLAIN, BF16}
    ]


@dataclass(frozen=True)
class Dont:
    """How often "nothing beats the bf16 hook" was predicted, and was true.

    Attributes:
        right: predicted and true.
        wrong: predicted and not true.
        missed: true and not predicted.
        draws_wrong: how many of `wrong` are draws: the fastest method and the hook differ by less
            than 5 %, so that either choice is close to the best.
        draws_missed: how many of `missed` are.
    """

    right: int
    wrong: int
    missed: int
    draws_wrong: int
    draws_missed: int

    @property
    def precision(self) -> float | None:
        return _ratio(self.right, self.right + self.wrong)

    @property
    def recall(self) -> float | None:
        return _ratio(self.right, self.right + self.missed)

    @property
    def precision_without_draws(self) -> float | None:
        return _ratio(self.right, self.right + self.wrong - self.draws_wrong)

    @property
    def recall_without_draws(self) -> float | None:
        return _ratio(self.right, self.right + self.missed - self.draws_missed)


def dont(found: Sequence[Group]) -> Dont:
    said = [group for group in found if group.gain(predicted) <= 1]
    true = [group for group in found if group.gain(measured) <= 1]
    wrong = [group for group in said if group not in true]
    missed = [group for group in true if group not in said]
    draws = (
        sum(1 / _CLOSE < group.gain(measured) < _CLOSE for group in each)
        for each in (wrong, missed)
    )
    return Dont(len(said) - len(wrong), len(wrong), len(missed), *draws)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def link(row: Row) -> str:
    """The name of a link: "4 hosts of 2 ranks, 100 Mbit/s, 500 us"."""
    ranks = f" of {row['ranks']} ranks" if row["ranks"] != "1" else ""
    return f"{row['hosts']} hosts{ranks}, {int(row['mbit']):,} Mbit/s, {row['delay_us']} us"


def model(row: Row) -> str:
    """The name of a model, with the images per rank and step if these are not the usual ones."""
    return row["model"] + ("" if row["batch"] == _USUAL_BATCH else f", {row['batch']} images")


# --- The page -------------------------------------------------------------------------------------


def latest(path: Path) -> list[Row]:
    """The last row of each set-up."""
    names = ("hosts", "ranks", "mbit", "delay_us", "model", "batch", "method", "levels")
    return list({tuple(row[name] for name in names): row for row in read(path)}.values())


def page(results: Path) -> str:
    """The text of docs/prediction.md."""
    rows = latest(results / "predict.csv")
    if not rows:
        return f"{_HEAD.strip()}\n\nNot measured yet.\n"
    found = groups(rows)
    parts = [
        _HEAD,
        "## Goals",
        markdown(["goal", "measured", "reached"], goals(rows, found)),
        *_by("Errors by method", "method", rows, lambda row: f"`{row['method']}`"),
        *_by("Errors by link", "link", rows, link),
        "## Choices",
        _CHOICES,
        markdown(_CHOICE_HEADS, [_choice(group) for group in found]),
        "## From the numbers of the link alone",
        _FORMULA,
        markdown(["rows", "median", "90th percentile"], [_summary("all", rows, computed)]),
        "## All set-ups",
        _ALL,
        *_all(rows),
        "## Conditions",
        _conditions(rows),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


_HEAD = """
# Predicted and measured step times

`torchcomp.advisor` predicts the time of a training step with any method: see
[usage](usage.md#hours-and-bytes-of-a-run). This page compares its predictions with measured times,
on hosts with shaped links that share the cores of one machine. It is generated; do not edit it:

```
python -m benchmarks.predict --resume
python -m benchmarks.report_prediction
```

A prediction is made from four things, which are measured on the link before any method runs:

1. the seconds of each collective by the size of its message;
2. the step without any exchange, when each of DDP's buckets is ready in it, and the share of a core
   that each rank gets while all of them compute;
3. the work of the method between its collectives, recorded by each rank alone;
4. the cost of the hook: what a step takes more than its parts if a rank sends one value of a
   bucket, with `topk(k=1)` for our methods, and with a hook of PyTorch for plain DDP and the bf16
   hook. Threads hand over, and ranks wait for each other. (Rows of revision 0de6ccc have no such
   cost, and those of bbec3e6 only for our methods: they were measured before.)

doctor and `torchcomp plan` know less: they place the buckets by their sizes, and leave out the cost
of the hook. `plan` also computes the collectives: [its errors](#from-the-numbers-of-the-link-alone)
are larger.

A simulation of the step puts them together: buckets become ready one by one, a thread encodes and
exchanges them in order, and both share the cores of the rank. What was fitted, and to what:

- Curves of the collectives: to messages of 64 bytes to 64 MiB on the same link, in 12 seconds for
  each group of ranks, 24 with 16. Longer messages are extrapolated.
- Ready times of the buckets, and the work of the methods: to the same model on the same ranks,
  without an exchange.
- DDP's all-reduces run one after another: to pairs of all-reduces on 2, 4 and 8 hosts.
- In the formulas of `torchcomp plan`, gloo's 2.6 latencies per hop and 1.2 ns of a core per byte:
  to an all-to-all of 64 bytes and an all-reduce of 16 MiB between 2 hosts.
- Messages longer than measured: if another collective was measured with 16 times as many bytes,
  its time per byte is used. The 16 was chosen with the rows below in view; 16 to 64 give the same
  result.
- The cost of the hook: to the two hooks that send one value of a bucket. They have no rows below.

No other constant was fitted to a step with the exchange of a row below: the rows are held out.
"""

_CHOICES = """
For each model and link: the gradient method with the shortest predicted step, and the one with the
shortest measured step. *Gain* is the time of DDP with the bf16 hook, divided by that of the fastest
other method except plain DDP. If it is at most 1, nothing beats the hook: "don't". If the measured
gain is within 5 % of 1, it is a draw: either answer is close to the best. Local steps are left out,
because they change the algorithm. Left out as well, after it was measured, is the MLP on links of
10 and 50 us: the times of its steps of 4 to 8 ms differed by half between two launches.

The processes share two cores, and a thread that waits for a core waits for the time slice of
another one. On links of 10 and 50 us, slices of 3 ms made an all-reduce of 64 bytes take 0.8 or
3.3 ms, by chance, and steps of 6 ms of the small CNN differed by a fifth between two launches.
After 8 of 51 choices were lost, all rows on these links were therefore measured again with slices
of 0.1 ms. Rows on links of 500 us have slices of 3 ms.

With 64 and 128 images, steps mostly compute, and methods are a few percent apart, as are two
repetitions of one of them. Two repetitions gave 25 right and 2 wrong answers, with gains of 1.01
and 1.02. All of these set-ups, named before they were measured, were therefore measured again with
four: `python -m benchmarks.predict --delay 10 50 --models smallcnn --batch 64 128 --rounds 4`.
"""

_CHOICE_HEADS = ["link, model", "chosen", "best", "chosen / best", "gain predicted", "measured"]

_FORMULA = """
`torchcomp plan` and `advisor.plan` compute the collectives of ranks that one does not have
from bandwidth and latency, with formulas for gloo and NCCL. Here the same set-ups are predicted in
this way: bandwidth, latency and the work of the methods are known, the collectives are not
measured. The formulas charge gloo's processor time to the cores, but a collective that runs alone
takes only as long as its link. Fast links among many ranks on few cores are therefore predicted
worst. The cost of the hook is not in them either.
"""

_ALL = """
Milliseconds of a step: the median over rounds of five steps (of large models, one step; of local
steps, one period), from two to four repetitions. *Others*: cores that other
processes kept busy, of which the switch between the hosts is one.
"""


def goals(rows: Sequence[Row], found: Sequence[Group]) -> list[list[str]]:
    """The rows of the table of goals."""
    ordered = errors(rows)
    middle, tail = statistics.median(ordered), percentile(ordered, 0.9)
    close = statistics.mean(group.regret <= _CLOSE for group in found) if found else 0.0
    said = dont(found)
    return [
        [f"at least {_LEAST_SETUPS} set-ups", f"{len(rows)}", _yes(len(rows) >= _LEAST_SETUPS)],
        ["median error at most 10 %", f"{middle:.1%}", _yes(middle <= _MEDIAN_GOAL)],
        ["90th percentile at most 25 %", f"{tail:.1%}", _yes(tail <= _TAIL_GOAL)],
        [
            "chosen method within 5 % of the best in 90 % of groups",
            f"{close:.1%} of {len(found)}",
            _yes(close >= _CHOICE_GOAL),
        ],
        [
            '"don\'t": precision at least 0.95',
            f"{_share(said.precision)} ({said.right} right, {said.wrong} wrong); without draws "
            f"{_share(said.precision_without_draws)}",
            _yes((said.precision or 0) >= _DONT_GOAL),
        ],
        [
            '"don\'t": recall at least 0.95',
            f"{_share(said.recall)} ({said.missed} missed); without draws "
            f"{_share(said.recall_without_draws)}",
            _yes((said.recall or 0) >= _DONT_GOAL),
        ],
    ]


def _share(value: float | None) -> str:
    return "none said or true" if value is None else f"{value:.2f}"


def _yes(true: bool) -> str:
    return "yes" if true else "**no**"


def _by(title: str, head: str, rows: Sequence[Row], name: Callable[[Row], str]) -> list[str]:
    """A section with the errors of each kind of row."""
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        kinds[name(row)].append(row)
    table = [_summary(kind, alike, predicted) for kind, alike in kinds.items()]
    return [f"## {title}", markdown([head, "median", "90th percentile"], table)]


def _summary(name: str, rows: Sequence[Row], estimate: Estimate) -> list[str]:
    ordered = errors(rows, estimate)
    return [name, f"{statistics.median(ordered):.1%}", f"{percentile(ordered, 0.9):.1%}"]


def _choice(group: Group) -> list[str]:
    return [
        group.name,
        f"`{group.chosen()}`",
        f"`{group.best}`",
        f"{group.regret:.2f}" + (" **lost**" if group.regret > _CLOSE else ""),
        f"{group.gain(predicted):.2f}",
        f"{group.gain(measured):.2f}",
    ]


def _all(rows: Sequence[Row]) -> list[str]:
    """A table of every row, for each link and model."""
    tables: dict[str, list[list[str]]] = defaultdict(list)
    for row in rows:
        levels = ", two levels" if row["levels"] == "2" else ""
        tables[f"**{link(row)}, {model(row)}**"].append(
            [
                f"`{row['method']}`{levels}",
                f"{measured(row):.1f}",
                f"{predicted(row):.1f}",
                f"{predicted(row) / measured(row) - 1:+.1%}",
                f"{computed(row):.1f}",
                row["other_cores"],
            ]
        )
    heads = ["method", "measured", "predicted", "error", "from the link alone", "others"]
    return [f"{title}\n\n{markdown(heads, table)}" for title, table in tables.items()]


def _conditions(rows: Sequence[Row]) -> str:
    def distinct(column: str) -> str:
        return ", ".join(sorted({row[column].partition("T")[0] for row in rows}))

    return f"""
Measured on {distinct("date")}, on {distinct("device")} with {distinct("cpus")} cores for all ranks
and the switch, with torch {distinct("torch")}, at revision {distinct("revision")} (+: with
uncommitted changes). Latency {distinct("delay_us")} us one way, {distinct("batch")} images per
rank.
"""


if __name__ == "__main__":
    main()
