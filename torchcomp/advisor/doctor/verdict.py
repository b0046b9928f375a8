"""Verdict: whether training waits for the network, and what would help.

Its rows are measured, or predicted by a model of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchcomp.advisor.doctor.phases import NO_EXCHANGE, PLAIN, StepTimes
from torchcomp.advisor.doctor.quartiles import quartiles

NOTHING, LITTLE = 0.10, 0.25
"""Shares of a step that wait for gradients: below the first nothing can be won, below the second
little."""

NETWORK, PARTLY, COMPUTE = "network-bound", "partly network-bound", "compute-bound"
UNCLEAR = "unclear"
"""The steps vary by more than the exchange takes."""


_FEW, _VARIATION = 3, 0.2
_WORTH = 0.95  # of the step of plain DDP: a method that takes more is not worth it


@dataclass(frozen=True)
class Row:
    """The step time of one method.

    Attributes:
        method: its spec or name.
        seconds: of a step.
        low: with the interval from `low`...
        high: ... to `high`: quartiles if measured, the error of the model if predicted.
        steps: how many steps were measured; 0 if it is predicted.
        caveat: what else to know, or "".
        local: whether these are local steps, which train in another way.
    """

    method: str
    seconds: float
    low: float
    high: float
    steps: int
    caveat: str = ""
    local: bool = False

    @property
    def interval(self) -> tuple[float, float]:
        """Between what the step may take: a few steps do not show how they vary."""
        if 0 < self.steps < _FEW:
            return self.seconds * (1 - _VARIATION), self.seconds * (1 + _VARIATION)
        return self.low, self.high


@dataclass(frozen=True)
class Verdict:
    """What the steps show.

    Attributes:
        bound: "network-bound", "partly network-bound", "compute-bound" or "unclear".
        waiting: share of a step of plain DDP that waits for gradients.
        rows: the methods, measured ones first.
        advice: what to do, as a sentence.
    """

    bound: str
    waiting: float
    rows: tuple[Row, ...]
    advice: str


def measured_rows(ranks: Sequence[Sequence[StepTimes]]) -> list[Row]:
    """Return a row for each mode, from the times of all ranks.

    The slowest rank counts: without an exchange, the others do not wait for it.
    """
    rows = []
    for times in zip(*ranks, strict=True):
        slowest = max(times, key=lambda each: each.median)
        low, high = quartiles(slowest.seconds)
        rows.append(Row(slowest.mode, slowest.median, low, high, len(slowest.seconds)))
    return rows


def judge(measured: Sequence[Row], predicted: Sequence[Row] = ()) -> Verdict:
    """Return the verdict on measured steps.

    Args:
        measured: rows of all :data:`.MODES`.
        predicted: rows of other methods, from a model of the step.
    """
    by_name = {row.method: row for row in measured}
    ddp, floor = by_name[PLAIN].seconds, by_name[NO_EXCHANGE].seconds
    waiting = max(0.0, 1 - floor / ddp)
    rows = (*measured, *sorted(predicted, key=lambda row: row.seconds))
    if waiting < NOTHING:
        advice = "Nothing to win: keep plain DDP."
        return Verdict(COMPUTE, waiting, rows, advice)
    overlap = by_name[NO_EXCHANGE].interval[1] > by_name[PLAIN].interval[0]
    # Nothing is faster than no exchange.
    if overlap or min(row.seconds for row in measured) < (1 - NOTHING) * floor:
        advice = "The steps vary too much to say: end other programs, or raise --seconds."
        return Verdict(UNCLEAR, waiting, rows, advice)
    advice = f"Without any exchange it would be {ddp / floor:.1f}x faster."
    advice += f" {_faster(rows, ddp) or 'No method is faster than plain DDP.'}"
    if not predicted and waiting >= LITTLE:
        advice += " Try the methods of docs/choosing.md, which send less."
    return Verdict(NETWORK if waiting >= LITTLE else PARTLY, waiting, rows, advice)


def _faster(rows: Sequence[Row], ddp: float) -> str:
    """Name the fastest method of each kind: measured, predicted, and local steps."""
    others = [row for row in rows if row.method not in (PLAIN, NO_EXCHANGE)]
    found = []
    for steps, local in ((True, False), (False, False), (False, True)):
        kind = [row for row in others if bool(row.steps) == steps and row.local == local]
        best = min(kind, key=lambda row: row.seconds, default=None)
        if best is not None and best.seconds <= _WORTH * ddp:
            how = "" if steps else " (predicted)"
            found.append(f"{best.method} is {ddp / best.seconds:.1f}x faster{how}")
    return "; ".join(found) + "." if found else ""


def speedup(row: Row, rows: Sequence[Row]) -> float:
    """Return how many times faster than plain DDP a row is."""
    plain = next(each for each in rows if each.method == PLAIN)
    return plain.seconds / row.seconds
