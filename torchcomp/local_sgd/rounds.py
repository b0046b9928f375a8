"""Rounds: the steps and rounds of one rank, and the fragments that synchronise out of phase."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise

from torch import Tensor

from torchcomp.engine.bucket import Caps, Group, merge, partition
from torchcomp.local_sgd.method import LocalMethod, Parameters
from torchcomp.local_sgd.schedules import Horizon, Schedule

_log = logging.getLogger(__package__)


@dataclass
class Fragment:
    """Parameters that are averaged together, and their current or last round."""

    groups: tuple[Group, ...]  # each is averaged as one bucket
    schedule: Schedule
    owners: tuple[int, ...]  # indices of the optimizers whose learning rates the schedule reads
    phase: tuple[int, int]  # (p, P): the run's first round takes p/P of a full one
    start: int = 0  # steps of the run before the round
    end: int = 0  # the step, counted from 1, after which it synchronises
    synced: int = 0  # the step after which it synchronised last
    lrs: list[float] = field(default_factory=list)  # by parameter group, at the first step
    # Sum of each step's largest learning rate, over the steps since `synced`. A tensor if the
    # learning rate is on an accelerator.
    lr_sum: float | Tensor = 0.0

    def __str__(self) -> str:
        return f"{self.start} to {self.end}"

    @property
    def names(self) -> list[str]:
        return list(chain.from_iterable(self.groups))

    def begin_round(self, step: int, lrs: list[float], horizon: Horizon) -> None:
        """Fix the length of the round that begins after `step` steps; if this raises, nothing."""
        # Beyond the announced end, the run can stop after any step.
        end = step + 1
        if step < horizon.total_steps:
            # The paper has one learning rate. The largest gives the shortest round.
            end = self.schedule.round_end(step, max(lrs, default=0.0), horizon)
        if step == 0:
            # Rounded up, so that the round has at least one step.
            numerator, denominator = self.phase
            end = -(-end * numerator // denominator)
        self.start, self.end, self.lrs = step, end, lrs

    def warn_if_long(self, total: int) -> None:
        """Log a warning if the round is more than half of a run of `total` steps."""
        # A warm-up learning rate of 1e-6 in the paper's rule makes one round of the whole run.
        if self.schedule.reads_lr and self.start < total < 2 * (self.end - self.start):
            _log.warning(
                "the ranks do not average from step %d to %d, more than half of the run (%d "
                "steps), because the learning rate is %g. If this is a warm-up learning rate, set "
                "warmup_steps. Otherwise compare the schedule's coefficient with the peak",
                *(self.start, self.end, total, max(self.lrs, default=0.0)),
            )


@dataclass
class Clock:
    """The optimizer steps and rounds of one rank, also when the script has dropped its model."""

    total_steps: int
    fragments: list[Fragment]
    step: int = 0  # optimizer steps, including those that a GradScaler skipped

    @property
    def next_sync(self) -> int | None:
        """The earliest end of the rounds in progress, or None if there are none."""
        return min((each.end for each in self.fragments if self.step > each.synced), default=None)

    def warn_inside_round(self) -> None:
        """Log a warning if a round is in progress, because then every rank has its own model."""
        if self.next_sync is not None:
            _log.warning(
                "local steps ended at step %d of %d, inside the round from %s: the ranks' "
                "parameters differ, so evaluating or saving on one rank uses only its own model",
                *(self.step, self.total_steps, " and ".join(map(str, self.fragments))),
            )


def fragments_of(method: LocalMethod, parameters: Parameters, caps: Caps) -> list[Fragment]:
    """Cut the parameters of every schedule into fragments whose rounds are out of phase.

    They have about equal bytes and follow registration order. The first round of fragment p of P
    (counted from 0) takes (p + 1)/P of a full round. After that, they synchronise one after
    another, as in Streaming DiLoCo (Douillard et al., 2025, arXiv 2501.18512), but the average is
    applied without a delay. All synchronise at the end of the run.
    """
    pieces, found = int(method.fragments), []
    for (names, owners), schedule in zip(method.parts, method.schedules, strict=True):
        sizes = [parameters[name].nbytes for name in names]
        # A parameter belongs to the piece that contains its middle byte.
        middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
        # max(..., 1), because all parameters can be empty.
        fair = [int(pieces * middle / max(sum(sizes), 1)) for middle in middles]
        for index, (start, stop) in enumerate(pairwise(_bounds(fair, pieces))):
            groups = partition([(name, parameters[name]) for name in names[start:stop]], caps)
            if method.aggregator.whole_model:
                groups = merge(groups, parameters)
            found.append(Fragment(groups, schedule, owners, (index + 1, pieces)))
    return found


def _bounds(fair: Sequence[int], pieces: int) -> list[int]:
    """The ``pieces + 1`` bounds of the pieces: parameter i in ``fair[i]``, but no piece empty."""
    bounds = [0]
    for index in range(1, pieces):
        before = sum(piece < index for piece in fair)
        # At least one parameter in the piece that ends here, and one left for each piece after it.
        bounds.append(min(max(before, bounds[-1] + 1), len(fair) - pieces + index))
    return [*bounds, len(fair)]
