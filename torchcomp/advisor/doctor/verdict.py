"""Verdict: whether training waits for the network, and what would help, measured or predicted."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from torchcomp.advisor.collectives import Times
from torchcomp.advisor.doctor.job import Job
from torchcomp.advisor.doctor.phases import NO_EXCHANGE, PLAIN
from torchcomp.advisor.doctor.ranks import quartiles
from torchcomp.advisor.prediction import BF16, DDP, USUAL, Prediction, Run
from torchcomp.advisor.recording import MOST_ELEMENTS, random_values

# Shares of a step that wait for gradients: below the first nothing can be won, below the second
# little.
_NOTHING, _LITTLE = 0.10, 0.25
ERROR = 0.25  # more than nine in ten predictions are closer: see docs/prediction.md
_STEPS = 1000  # of the run whose mean step is predicted
_LOCAL = "local steps: each rank trains alone between two averages, see docs/methods/local-sgd.md"
_FEW, _VARIATION = 3, 0.2
_WORTH = 0.95  # of the step of plain DDP: a method that takes more is not worth it


@dataclass(frozen=True)
class Row:
    """The step time of one method."""

    method: str  # its spec or name
    seconds: float  # of a step, from `low` to `high`:
    low: float  # quartiles if measured, the error of the model if predicted
    high: float
    steps: int  # how many were measured; 0 if it is predicted
    caveat: str = ""  # what else to know
    local: bool = False  # whether these are local steps, which train in another way

    @property
    def interval(self) -> tuple[float, float]:
        """Between what the step may take: a few steps do not show how they vary."""
        if 0 < self.steps < _FEW:
            return self.seconds * (1 - _VARIATION), self.seconds * (1 + _VARIATION)
        return self.low, self.high


@dataclass(frozen=True)
class Verdict:
    """What the steps show."""

    bound: str  # "network-bound", "partly network-bound", "compute-bound" or "unclear"
    waiting: float  # share of a step of plain DDP that waits for gradients
    rows: tuple[Row, ...]  # the methods, measured ones first
    advice: str  # what to do, as a sentence


def measured_rows(ranks: Sequence[Mapping[str, Sequence[float]]]) -> list[Row]:
    """Return a row for each mode, from the seconds of the rank that was slowest."""
    rows = []
    for mode in ranks[0]:
        slowest = max((times[mode] for times in ranks), key=statistics.median)
        rows.append(Row(mode, statistics.median(slowest), *quartiles(slowest), len(slowest)))
    return rows


def predicted_rows(
    job: Job,
    parameters: Mapping[str, Tensor],
    alone: float,
    collectives: Times,
    cores: float,
    budget: float,
) -> list[Row]:
    """Predict the step times of further methods, as far as there is time. All ranks call this.

    Nothing is trained with them. Each rank records the work of a method on gradients of the model's
    size, and simulates a step with what was measured: `alone`, the seconds of a step without any
    exchange, and the collectives.
    """
    if sum(each.numel() for each in parameters.values()) > MOST_ELEMENTS:
        return []
    began = time.monotonic()
    values = random_values(parameters, job.device)
    # Where ranks share cores, a step needs less of a core than its time on the clock.
    run = Run(job.world_size, _STEPS, alone * min(1.0, cores))
    rows = []
    for spec in USUAL:
        if spec in (DDP, BF16):  # these are measured
            continue
        prediction = Prediction(spec, values, run)
        seconds = prediction.step(collectives, cores=cores).seconds
        passed = time.monotonic() - began
        ranks = job.gather(f"prediction of {spec}", [seconds, passed], job.patience + budget)
        seconds, passed = map(max, zip(*ranks, strict=True))
        low, high = seconds * (1 - ERROR), seconds * (1 + ERROR)
        caveat = _LOCAL if prediction.local else ""
        rows.append(Row(spec, seconds, low, high, 0, caveat, prediction.local))
        if passed > budget:
            break
    return rows


def judge(measured: Sequence[Row], predicted: Sequence[Row] = ()) -> Verdict:
    """Return the verdict on measured steps, of all :data:`.MODES`, and on predicted ones."""
    by_name = {row.method: row for row in measured}
    ddp, floor = by_name[PLAIN].seconds, by_name[NO_EXCHANGE].seconds
    waiting = max(0.0, 1 - floor / ddp)
    rows = (*measured, *sorted(predicted, key=lambda row: row.seconds))
    if waiting < _NOTHING:
        return Verdict("compute-bound", waiting, rows, "Nothing to win: keep plain DDP.")
    overlap = by_name[NO_EXCHANGE].interval[1] > by_name[PLAIN].interval[0]
    # Nothing is faster than no exchange.
    if overlap or min(row.seconds for row in measured) < (1 - _NOTHING) * floor:
        advice = "The steps vary too much to say: end other programs, or raise --seconds."
        return Verdict("unclear", waiting, rows, advice)
    advice = f"Without any exchange it would be {ddp / floor:.1f}x faster."
    advice += f" {_faster(rows, ddp) or 'No method is faster than plain DDP.'}"
    if not predicted and waiting >= _LITTLE:
        advice += " Try the methods of docs/choosing.md, which send less."
    bound = "network-bound" if waiting >= _LITTLE else "partly network-bound"
    return Verdict(bound, waiting, rows, advice)


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
